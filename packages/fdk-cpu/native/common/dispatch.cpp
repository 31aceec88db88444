#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "arm/cpu_features.h"
#include "common/kernels.h"

namespace fdk {
namespace {

constexpr const char* kNames[kIsas] = {"scalar", "neon", "neondot", "neonbf16",   "neoni8mm", "sve",
                                       "sve2",   "avx2", "avx512",  "avx512bf16", "amx"};

#if defined(__x86_64__)
// Clang has no name for it in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// The system's state that tiles are, as arch_prctl(2) counts them.
constexpr long kTileData = 18;

// Whether the processor multiplies tiles of bf16, and the system keeps tiles for those who ask.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kTile) == 0 || (d & kBf16) == 0) return false;
  constexpr long kSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  unsigned long states = 0;
  return syscall(SYS_arch_prctl, kSupported, &states) == 0 && (states >> kTileData & 1) != 0;
#else
  return false;
#endif
}
#endif

// Asks the system for what a supported set needs. Why it refuses, or nothing. Linux lets a process
// have tiles, for all of its threads, unless one has an alternate signal stack that they would not
// fit; later ones have to hold AT_MINSIGSTKSZ.
std::string refusal([[maybe_unused]] Isa isa) {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  if (isa == Isa::amx && syscall(SYS_arch_prctl, kRequest, kTileData) != 0) {
    const std::string why = errno == ENOSPC
                                ? "a thread has an alternate signal stack below AT_MINSIGSTKSZ"
                                : std::generic_category().message(errno);
    return "Linux lets this process have no tiles: " + why;
  }
#endif
  return {};
}

Isa best() {
  for (int i = kIsas - 1; i > 0; i--) {
    if (supported(Isa(i)) && refusal(Isa(i)).empty()) return Isa(i);
  }
  return Isa::scalar;
}

std::string names() {
  std::string text;
  for (int i = 0; i < kIsas; i++) {
    if (supported(Isa(i))) text += (text.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  return text;
}

// The set of a name, or the best for "auto".
Isa chosen(const std::string& name, const char* origin) {
  if (name == "auto") return best();
  for (int i = 0; i < kIsas; i++) {
    if (name != kNames[i] || !supported(Isa(i))) continue;
    const std::string why = refusal(Isa(i));
    if (!why.empty()) throw std::invalid_argument(std::string(origin) + ": " + name + ": " + why);
    return Isa(i);
  }
  throw std::invalid_argument(std::string(origin) + ": this machine runs " + names() +
                              "; wanted one of them or auto, got " + name);
}

// -1 until it is first asked for.
std::atomic<int> current{-1};

}  // namespace

const char* name_of(Isa isa) { return kNames[int(isa)]; }

bool supported(Isa isa) {
  if (isa == Isa::scalar) return true;
#if defined(__aarch64__)
  if (isa == Isa::neon) return true;  // part of the architecture
  const ArmFeatures features = arm_features();
  if (isa == Isa::neondot) return features.dotprod;
  const bool bf16 = features.dotprod && features.bf16, i8mm = bf16 && features.i8mm;
  if (isa == Isa::neonbf16) return bf16;
  if (isa == Isa::neoni8mm) return i8mm;
#if defined(FDK_CPU_SVE)
  if (isa == Isa::sve) return i8mm && features.sve_bf16 && features.sve_bits >= 256;
  if (isa == Isa::sve2) return i8mm && features.sve2_bf16;
#endif
  return false;
#elif defined(__x86_64__)
  if (isa < Isa::avx2) return false;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == Isa::avx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (isa == Isa::avx512) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (isa == Isa::avx512bf16) return bf16;
  return bf16 && has_amx();
#else
  return false;
#endif
}

Isa current_isa() {
  int isa = current.load(std::memory_order_relaxed);
  if (isa < 0) {
    const char* pinned = std::getenv("FDK_CPU_ISA");
    const bool is_pinned = pinned != nullptr && *pinned != '\0';
    isa = int(chosen(is_pinned ? pinned : "auto", "FDK_CPU_ISA"));
    current.store(isa, std::memory_order_relaxed);
  }
  return Isa(isa);
}

void set_isa(const char* name, const char* origin) {
  current.store(int(chosen(name, origin)), std::memory_order_relaxed);
}

const Kernels& float_kernels_for([[maybe_unused]] Isa isa) {
#if defined(__aarch64__)
  if (isa >= Isa::neon && isa < Isa::avx2) return kNeon;
#endif
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return kAvx512;
  if (isa == Isa::avx2) return kAvx2;
#endif
  return kScalar;
}

const Kernels& kernels_for(Isa isa, [[maybe_unused]] Activation activation) {
#if defined(__aarch64__)
#if defined(FDK_CPU_SVE)
  if (isa == Isa::sve && activation == Activation::bf16) return kSve;
  if (isa == Isa::sve2 && activation == Activation::bf16) return kSve2;
#endif
  const bool bf16 = isa == Isa::neonbf16 || isa == Isa::neoni8mm;
  if (bf16 && activation == Activation::bf16) return kNeonBf16;
#endif
#if defined(__x86_64__)
  if (isa == Isa::amx && activation == Activation::bf16) return kAmx;
  if (isa == Isa::avx512bf16 && activation == Activation::bf16) return kAvx512Bf16;
  if (isa == Isa::avx2 && activation == Activation::bf16) return kAvx2Bf16;
#endif
  return float_kernels_for(isa);
}

}  // namespace fdk
