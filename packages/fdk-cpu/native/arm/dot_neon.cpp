// Dot products: NEON of any 64-bit ARM.
#include "arm/dot_neon-inl.h"

namespace fdk {

extern const Dots kDotsNeon = dots_of<NeonDots>();

}  // namespace fdk
