// Dot products by NEON, as every 64-bit ARM has it.
#include "arm/dot_neon-inl.h"

namespace fdk {

extern const Dots kDotsNeon = dots_of<NeonDots>();

}  // namespace fdk
