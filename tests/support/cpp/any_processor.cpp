// OpenVINO's library of ONNX Runtime, told that every device is Intel's: it compares a device's vendor
// with 0x8086 and offers no processor of another, though OpenVINO itself runs on those.
//
//   c++ -std=c++17 -shared -fPIC any_processor.cpp -o any_processor.so -ldl
//
// LINEXPORT_LIBRARY names OpenVINO's library.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>

namespace {

// The head of ONNX Runtime's OrtApi, a table that versions only append to.
constexpr std::size_t kVendorId = 308;  // HardwareDevice_VendorId
constexpr std::size_t kTable = 448;     // more than the library reads

struct Base {
    void* const* (*getApi)(std::uint32_t version);
    char const* (*getVersion)();
};

Base const* gReal = nullptr;
void* gTable[kTable];

std::uint32_t intel(void const*) {
    return 0x8086;
}

void* const* getApi(std::uint32_t version) {
    auto const table = gReal->getApi(version);
    if (table == nullptr) return nullptr;
    std::copy(table, table + kTable, gTable);
    gTable[kVendorId] = reinterpret_cast<void*>(intel);
    return gTable;
}

template <typename Function>
Function find(char const* name) {
    static void* const library = dlopen(std::getenv("LINEXPORT_LIBRARY"), RTLD_NOW);
    return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

extern "C" void* CreateEpFactories(char const* name, Base const* base, void const* logger,
    void** factories, std::size_t most, std::size_t* count) {
    static Base told;
    gReal = base;
    told = {getApi, base->getVersion};
    return find<decltype(&CreateEpFactories)>("CreateEpFactories")(
        name, &told, logger, factories, most, count);
}

extern "C" void* ReleaseEpFactory(void* factory) {
    return find<decltype(&ReleaseEpFactory)>("ReleaseEpFactory")(factory);
}
