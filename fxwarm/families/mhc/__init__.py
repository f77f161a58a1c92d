"""What two libraries' rooms share about mHC: how its ops read, and the one rule that specialises both kernels.

No family: DeepGEMM's GEMM and TileLang's fused kernel each live in their own room.
"""
