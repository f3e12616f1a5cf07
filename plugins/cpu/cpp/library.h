// The operators as ONNX Runtime keeps them, and the domain that holds them.
#pragma once

#include "operator.h"

namespace linexport {

struct CustomOp : OrtCustomOp {
  CustomOp(const Declaration* declaration, int activation, int threads);
  const Declaration* declaration;
  int activation, threads;  // activation: the type of those
};

// A domain with all operators. It lives as long as the process: sessions refer to it.
OrtCustomOpDomain* new_domain(OrtApi api, const char* name, int threads);
void add_domain(OrtApi api, OrtSessionOptions* options, OrtCustomOpDomain* domain);

// The session's config entry "linexport.threads", or what is given.
int session_threads(OrtApi api, const OrtSessionOptions* options, int otherwise);

}  // namespace linexport
