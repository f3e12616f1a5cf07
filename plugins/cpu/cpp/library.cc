// What the shared library exports.
//
// RegisterCustomOps is the entry that ONNX Runtime calls (SessionOptions.register_custom_ops_library in
// Python, RegisterCustomOpsLibrary_V2 in C). It returns a status that says what is wrong.
#include "library.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "instruction_set.h"
#include "matmul_nbits.h"
#include "onnxruntime_call.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace linexport {
namespace {

// Cores this process may run on: what ONNX Runtime's pool has by default, one thread for each.
int cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

OrtCustomOpDomain* domain_for(OrtApi api, const char* name, int threads) {
  static std::mutex lock;
  static std::map<std::tuple<OrtApi, const char*, int>, OrtCustomOpDomain*> domains;
  std::lock_guard<std::mutex> hold(lock);
  OrtCustomOpDomain*& domain = domains[{api, name, threads}];
  if (!domain) domain = new_domain(api, name, threads);
  return domain;
}

}  // namespace
}  // namespace linexport

// Digest of the sources it was built from.
EXPORTED const char* linexport_sources() { return LINEXPORT_SOURCES; }

// The instruction set that kernels run with on this machine.
EXPORTED const char* linexport_instruction_set() { return linexport::instruction_set_name(); }

// Whether MatMulNBits runs on this machine.
EXPORTED int linexport_multiplies_integers() { return linexport::multiplies_integers(); }

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace linexport;
  OrtApi api = base->GetApi(kApiVersion);
  if (!api)
    return refuse(base, std::string("linexport's CPU library needs ONNX Runtime 1.") + std::to_string(kApiVersion) +
                            " or newer; this is " + base->GetVersionString());
  try {
    int threads = session_threads(api, options, cores());
    for (const char* name : {kDomain, kFusedDomain}) add_domain(api, options, domain_for(api, name, threads));
    return nullptr;
  } catch (const std::exception& error) {
    return refuse(base, std::string("linexport's CPU library cannot be registered: ") + error.what());
  }
}
