// The features of this ARM core beyond NEON, as the operating system reports them.
#pragma once

namespace fdk {

struct ArmCpuFeatures {
  bool dotprod;    // `sdot` in NEON
  bool bf16;       // `bfdot` etc. in NEON
  bool i8mm;       // `smmla` in NEON
  bool sve_bf16;   // the same in SVE
  bool sve2_bf16;  // and SVE2
  int sve_bits;    // vector length; 0 without SVE
};

ArmCpuFeatures arm_cpu_features();

}  // namespace fdk
