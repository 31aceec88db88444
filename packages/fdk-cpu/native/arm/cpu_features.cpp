#include "arm/cpu_features.h"

#if defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__APPLE__)
#include <cstddef>
#include <sys/sysctl.h>
#endif

namespace fdk {

#if defined(__linux__)

// The bits are those of Linux's arch/arm64 hwcap.h, which older headers lack.
ArmCpuFeatures arm_cpu_features() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const auto bit = [](unsigned long word, int at) { return (word >> at & 1) != 0; };
  ArmCpuFeatures f{};
  f.dotprod = bit(first, 20);
  f.bf16 = bit(second, 14);
  f.i8mm = bit(second, 13);
  const bool sve_bf16 = bit(first, 22) && bit(second, 12);  // SVE, SVEBF16
  f.sve_bf16 = f.bf16 && sve_bf16;
  f.sve2_bf16 = f.sve_bf16 && bit(second, 1);
  constexpr int kGetLength = 51, kLengthMask = 0xFFFF;  // PR_SVE_GET_VL and its mask, in bytes
  const int length = bit(first, 22) ? prctl(kGetLength, 0, 0, 0, 0) : 0;
  f.sve_bits = length > 0 ? 8 * (length & kLengthMask) : 0;
  return f;
}

#elif defined(__APPLE__)

ArmCpuFeatures arm_cpu_features() {
  const auto has = [](const char* name) {
    int value = 0;
    std::size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  ArmCpuFeatures f{};
  f.dotprod = has("hw.optional.arm.FEAT_DotProd");
  f.bf16 = has("hw.optional.arm.FEAT_BF16");
  f.i8mm = has("hw.optional.arm.FEAT_I8MM");
  return f;  // no Apple core runs SVE outside of its streaming mode
}

#else

ArmCpuFeatures arm_cpu_features() { return {}; }

#endif

}  // namespace fdk

#endif
