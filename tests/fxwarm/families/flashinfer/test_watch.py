"""After warmup: what the library builds and opens is heard, through its real classes."""

from __future__ import annotations

from types import SimpleNamespace

from fxwarm.families.flashinfer.watch import watch


def test_a_build_and_a_first_load_are_heard_of(library, monkeypatch):
    """``JitSpec`` is abstract since 0.6.18: a hook on it alone hears nothing."""
    from flashinfer.jit import core
    from flashinfer.jit.core import gen_jit_spec

    heard: list[tuple[str, str]] = []

    def report(event, **options) -> None:
        if not options.get("before"):
            heard.append((event.kind, event.op))

    monkeypatch.setattr(core, "run_ninja", lambda *args: None)
    monkeypatch.setattr(core, "tvm_ffi", SimpleNamespace(load_module=lambda path: "module"))
    monkeypatch.setattr(core.JitSpecNvcc, "write_ninja", lambda self: None)
    spec = gen_jit_spec("another_module", [])
    stop = watch(report, set())
    assert stop is not None
    try:
        assert spec.build_and_load() == "module"
    finally:
        stop()
    assert heard == [("build", "another_module"), ("load", "another_module")]
    spec.build_and_load()
    assert len(heard) == 2
