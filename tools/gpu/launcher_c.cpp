// The C++ launcher behind C functions, for programs without TensorRT's headers: checks on a GPU, and
// tests on a stand-in for its driver. Errors are written to `error`, and -1 or null is returned.
#include <algorithm>
#include <cstring>
#include <memory>

#include "launcher.h"

namespace {

struct Opened {
    linexport::Description description;
    std::unique_ptr<linexport::Launcher> launcher;
};

void tell(std::exception const& error, char* text, size_t size) {
    std::strncpy(text, error.what(), size - 1);
    text[size - 1] = 0;
}

}  // namespace

extern "C" {

void* linexport_open(char const* launch, char const* binaries, char* error, size_t size) {
    try {
        auto made = std::make_unique<Opened>();
        made->description = linexport::parse(launch, binaries);
        made->launcher = std::make_unique<linexport::Launcher>(made->description);
        return made.release();
    } catch (std::exception const& found) {
        tell(found, error, size);
        return nullptr;
    }
}

int64_t linexport_scratch(void const* opened, int64_t batch, int64_t length) {
    return static_cast<Opened const*>(opened)->description.mostScratch(batch, length);
}

// Shapes of the inputs one after another, `ranks` long; addresses of the inputs, then of the outputs.
int linexport_enqueue(void const* opened, int64_t const* shapes, int const* ranks, int inputs,
    void const* const* addresses, int tensors, void* workspace, void* stream, char* error, size_t size) {
    try {
        std::vector<std::vector<int64_t>> listed;
        for (int i = 0; i < inputs; shapes += ranks[i++]) listed.emplace_back(shapes, shapes + ranks[i]);
        std::vector<void const*> places(addresses, addresses + tensors);
        static_cast<Opened const*>(opened)->launcher->enqueue(
            listed, places, workspace, static_cast<CUstream>(stream));
        return 0;
    } catch (std::exception const& found) {
        tell(found, error, size);
        return -1;
    }
}

void linexport_close(void* opened) { delete static_cast<Opened*>(opened); }
}
