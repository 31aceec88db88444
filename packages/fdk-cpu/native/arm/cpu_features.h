// What this ARM core has beyond NEON, as its operating system tells.
#pragma once

namespace fdk {

struct ArmFeatures {
  bool dotprod;    // `sdot` in NEON
  bool bf16;       // `bfdot` and its kin in NEON
  bool i8mm;       // `smmla` in NEON
  bool sve_bf16;   // and in SVE
  bool sve2_bf16;  // and SVE2
  int sve_bits;    // of a vector; 0 without SVE
};

ArmFeatures arm_features();

}  // namespace fdk
