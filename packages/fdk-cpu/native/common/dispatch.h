// The instruction sets, the one in use, and the kernels of each.
#pragma once

#include "common/kernels.h"

namespace fdk {

enum class Isa : int {
  scalar,
  neon,
  neondot,
  neonbf16,
  neoni8mm,
  sve,
  sve2,
  avx2,
  avx512,
  avx512bf16,
  amx
};
inline constexpr int kIsas = 11;

const char* name_of(Isa isa);
// Returns whether this machine has the instructions; the system may still refuse AMX to a process.
bool supported(Isa isa);
// The set in use: that of set_isa, else of FDK_CPU_ISA, else the best. "auto" means the best.
Isa current_isa();
// Throws std::invalid_argument for an unknown name, and for a set that the machine does not have.
void set_isa(const char* name, const char* origin = "set_isa");
// The kernels for a dtype of activations: bf16 ones if the set has them, else float32.
const LinearKernels& linear_kernels_for(Isa isa, Activation activation);
const LinearKernels& float_linear_kernels_for(Isa isa);

}  // namespace fdk
