// Launching a described node through the CUDA driver: see linexport/plugins/tensorrt/launcher.py.
#pragma once

#include "description.h"
#include "modules.h"

namespace linexport {

class Launcher {
public:
    // Loads the kernels into the current context; throws Error.
    explicit Launcher(Description const& description);
    Launcher(Launcher const&) = delete;
    Launcher& operator=(Launcher const&) = delete;

    // Bytes of scratch memory that `enqueue` needs for this batch and length.
    int64_t scratch(Sizes const& sizes) const;

    // `addresses` are those of the inputs, then of the outputs, aligned to 16 bytes; throws Error.
    void enqueue(std::vector<std::vector<int64_t>> const& shapes, std::vector<void const*> const& addresses,
        void* workspace, DriverStream stream) const;

private:
    struct Loaded {
        std::shared_ptr<Module> module;
        DriverFunction function;
        unsigned shared;
    };
    Description const& mDescription;
    Plan mPlan;  // with the multiprocessors of this GPU
    std::map<std::string, Loaded> mKernels;
};

}  // namespace linexport
