"""Exponentials that inductor writes into its loops: a call of torch's saves all vector registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# e^x = 2^n e^r with n = round(x / log 2) and Cephes' polynomial of e^r (S. Moshier, single/expf.c).
# NaN stays NaN; where the value is below the least normal number, it may be 0.
INLINE = """[&](auto x) {{
  using V = decltype(x);
  if constexpr (!std::is_same_v<V, at::vec::Vectorized<float>>) {{
    return x.exp();
  }} else {{
#ifdef CPU_CAPABILITY_AVX512
    auto times_power_of_2 = [](V p, V n) {{ return V(_mm512_scalef_ps(p, n)); }};
    V least(-104.0f);
#else
    auto times_power_of_2 = [](V p, V n) {{
      at::vec::Vectorized<int32_t> offset(126), places(23);  // 2^128 alone is no float32
      return (p + p) * at::vec::cast<float>((at::vec::convert_to_int_of_same_size(n) + offset) << places);
    }};
    V least(-87.0f);
#endif
    x = at::vec::clamp(x, least, V(89.0f));
    V n = (x * V(1.44269504f)).round();
    V r = at::vec::fmadd(n, V(-0.693359375f), x);
    r = at::vec::fmadd(n, V(2.12194440e-4f), r);
    V p = at::vec::fmadd(V(1.9875691500e-4f), r, V(1.3981999507e-3f));
    p = at::vec::fmadd(p, r, V(8.3334519073e-3f));
    p = at::vec::fmadd(p, r, V(4.1665795894e-2f));
    p = at::vec::fmadd(p, r, V(1.6666665459e-1f));
    p = at::vec::fmadd(p, r, V(5.0000001201e-1f));
    p = at::vec::fmadd(p, r * r, r + V(1.0f));
    return times_power_of_2(p, n);
  }}
}}({})"""


@contextmanager
def inlined() -> Iterator[None]:
    """Let inductor write float32 exponentials as `INLINE`, to one unit in the last place."""
    try:
        from torch._inductor.codegen.cpp import CppVecOverrides

        called = CppVecOverrides.__dict__["exp"]
    except (ImportError, KeyError):  # another release of torch
        yield
        return
    CppVecOverrides.exp = staticmethod(INLINE.format)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppVecOverrides.exp = called  # type: ignore[method-assign]
