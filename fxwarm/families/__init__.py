"""One room a kernel library; everything that knows a library lives in its room."""
