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
#include "common/dispatch.h"
#include "common/kernels.h"

namespace fdk {
namespace {

constexpr const char* kNames[kIsas] = {"scalar", "neon", "neondot", "neonbf16",   "neoni8mm", "sve",
                                       "sve2",   "avx2", "avx512",  "avx512bf16", "amx"};

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know F16C.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// XFEATURE_XTILEDATA, the state component of tiles in arch_prctl(2).
constexpr long kTileData = 18;

// Returns whether the processor has AMX-BF16 and the system can save its tiles.
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

// Requests what the system must grant for a supported set, and returns why it refuses, or nothing.
// Linux grants tiles to all threads of a process, unless one has an alternate signal stack too
// small for them; later stacks must hold AT_MINSIGSTKSZ bytes.
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

// The set of a name; the best for "auto".
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

// -1 until first used.
std::atomic<int> current{-1};

}  // namespace

const char* name_of(Isa isa) { return kNames[int(isa)]; }

bool supported(Isa isa) {
  if (isa == Isa::scalar) return true;
#if defined(__aarch64__)
  if (isa == Isa::neon) return true;  // part of the architecture
  const ArmCpuFeatures features = arm_cpu_features();
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

const LinearKernels& float_linear_kernels_for([[maybe_unused]] Isa isa) {
#if defined(__aarch64__)
  if (isa >= Isa::neon && isa < Isa::avx2) return kLinearNeon;
#endif
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return kLinearAvx512;
  if (isa == Isa::avx2) return kLinearAvx2;
#endif
  return kLinearScalar;
}

const LinearKernels& linear_kernels_for(Isa isa, [[maybe_unused]] Activation activation) {
#if defined(__aarch64__)
#if defined(FDK_CPU_SVE)
  if (isa == Isa::sve && activation == Activation::bf16) return kLinearSve;
  if (isa == Isa::sve2 && activation == Activation::bf16) return kLinearSve2;
#endif
  const bool bf16 = isa == Isa::neonbf16 || isa == Isa::neoni8mm;
  if (bf16 && activation == Activation::bf16) return kLinearNeonBf16;
#endif
#if defined(__x86_64__)
  if (isa == Isa::amx && activation == Activation::bf16) return kLinearAmx;
  if (isa == Isa::avx512bf16 && activation == Activation::bf16) return kLinearAvx512Bf16;
  if (isa == Isa::avx2 && activation == Activation::bf16) return kLinearAvx2Bf16;
#endif
  return float_linear_kernels_for(isa);
}

}  // namespace fdk
