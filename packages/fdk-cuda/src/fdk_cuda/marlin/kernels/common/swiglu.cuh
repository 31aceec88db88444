// SwiGLU of a gate and what it multiplies.
#pragma once

__forceinline__ float swiglu(float gate, float up) {
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}
