// Calls of ONNX Runtime's C interface by the place of a function in its table.
#pragma once

#include <stdexcept>
#include <string>

#include "onnxruntime_api.h"

namespace linexport {

template <int Place, typename... Arguments>
auto call(OrtApi api, Arguments... arguments) {
  return reinterpret_cast<typename Entry<Place>::Type>(api[Place])(arguments...);
}

// The value of a call that succeeded; the message of one that did not is thrown.
template <int Place, typename... Arguments>
void checked(OrtApi api, Arguments... arguments) {
  if (OrtStatus* status = call<Place>(api, arguments...)) {
    std::string message = call<GetErrorMessage>(api, status);
    call<ReleaseStatus>(api, status);
    throw std::runtime_error(message);
  }
}

// Whether the call succeeded.
template <int Place, typename... Arguments>
bool found(OrtApi api, Arguments... arguments) {
  OrtStatus* status = call<Place>(api, arguments...);
  if (status) call<ReleaseStatus>(api, status);
  return !status;
}

// What RegisterCustomOps returns where it has no table of functions to make a status with.
inline OrtStatus* refuse(const OrtApiBase* base, const std::string& reason) {
  OrtApi oldest = base->GetApi(1);  // whose first entry makes a status
  return call<CreateStatus>(oldest, int{kFail}, reason.c_str());
}

}  // namespace linexport
