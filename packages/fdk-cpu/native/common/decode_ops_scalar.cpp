// The operations of a decode step between its products: any machine.
#include "common/decode_ops-inl.h"

namespace fdk {

extern const DecodeOps kDecodeOpsScalar = decode_ops_of<ScalarOps>();

}  // namespace fdk
