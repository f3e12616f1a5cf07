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

    // `addresses` are those of the inputs, then of the outputs; throws Error.
    void enqueue(std::vector<std::vector<int64_t>> const& shapes, std::vector<void const*> const& addresses,
        void* workspace, CUstream stream) const;

private:
    struct Loaded {
        std::shared_ptr<Module> module;
        CUfunction function;
        unsigned shared;
    };
    Description const& mDescription;
    Plan mPlan;  // with the multiprocessors of this GPU
    std::map<std::string, Loaded> mKernels;
};

}  // namespace linexport
