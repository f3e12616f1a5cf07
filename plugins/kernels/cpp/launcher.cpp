#include "launcher.h"

#include <algorithm>

namespace linexport {
namespace {

unsigned constexpr sharedWithoutAsking = 48 * 1024;
unsigned constexpr lanes = 32;
uintptr_t constexpr alignment = 16;  // of tensors, which kernels are compiled for

}  // namespace

Launcher::Launcher(Description const& description) : mDescription(description) {
    Driver const& driver = Driver::get();
    int const sm = description.smFor(10 * attribute(Driver::capabilityMajor) +
        attribute(Driver::capabilityMinor));
    mPlan = description.plans.at(sm);
    // No more than the plan was made for: its scratch memory is enough for those.
    mPlan.multiprocessors =
        std::min<int64_t>(mPlan.multiprocessors, attribute(Driver::multiprocessorCount));
    for (auto const& [name, binary] : description.binaries.at(sm)) {
        Loaded loaded{Module::of(binary.code), nullptr, binary.shared};
        check(driver.moduleGetFunction(&loaded.function, loaded.module->handle(), binary.entry.c_str()));
        if (loaded.shared > sharedWithoutAsking)
            check(driver.funcSetAttribute(loaded.function,
                Driver::maxDynamicShared, static_cast<int>(loaded.shared)));
        // Otherwise at the first launch, which a graph may capture.
        if (driver.funcLoad) check(driver.funcLoad(loaded.function));
        mKernels.emplace(name, loaded);
    }
}

int64_t Launcher::scratch(Sizes const& sizes) const {
    int64_t const batch = sizes.at("batch"), length = sizes.at("length");
    Sizes const symbols = mPlan.symbols(batch, length);
    int64_t total = 0;
    for (Scratch const& buffer : mPlan.route(batch, length).scratch)
        total += aligned(buffer.bytes * buffer.elements.of(symbols));
    return total;
}

void Launcher::enqueue(std::vector<std::vector<int64_t>> const& shapes,
    std::vector<void const*> const& addresses, void* workspace, DriverStream stream) const {
    Sizes const sizes = mDescription.sizes(shapes);
    int64_t const batch = sizes.at("batch"), length = sizes.at("length");
    Sizes const symbols = mPlan.symbols(batch, length);
    Route const& route = mPlan.route(batch, length);

    std::map<std::string, void const*> places;
    size_t position = 0;
    for (auto const* tensors : {&mDescription.inputs, &mDescription.outputs})
        for (Tensor const& tensor : *tensors) {
            void const* const address = addresses.at(position++);
            if (!tensor.present) continue;
            if (reinterpret_cast<uintptr_t>(address) % alignment)
                throw Error(mDescription.opType + ": " + tensor.name + " is not aligned to 16 bytes");
            places[tensor.name] = address;
        }
    char* scratch = static_cast<char*>(workspace);
    for (Scratch const& buffer : route.scratch) {
        places[buffer.name] = scratch;
        scratch += aligned(buffer.bytes * buffer.elements.of(symbols));
    }

    for (Launch const& launch : route.launches) {
        unsigned grid[3];
        bool empty = false;
        for (int i = 0; i < 3; ++i) {
            grid[i] = static_cast<unsigned>(launch.grid[i].of(symbols));
            empty |= grid[i] == 0;
        }
        if (empty) continue;
        // Every compiled kernel takes two more pointers, for scratch memory none of ours needs.
        size_t const count = launch.arguments.size();
        std::vector<void const*> pointers(count + 2, nullptr);
        std::vector<int32_t> numbers(count);
        std::vector<void*> values(count + 2);
        for (size_t i = 0; i < count + 2; ++i) {
            values[i] = &pointers[i];
            if (i >= count) continue;
            Argument const& argument = launch.arguments[i];
            if (argument.pointer()) {
                pointers[i] = places.at(argument.name);
            } else {
                numbers[i] = static_cast<int32_t>(symbols.at(argument.name));
                values[i] = &numbers[i];
            }
        }
        Loaded const& kernel = mKernels.at(launch.kernel);
        check(Driver::get().launchKernel(kernel.function, grid[0], grid[1], grid[2],
            lanes * static_cast<unsigned>(launch.warps), 1, 1, kernel.shared, stream, values.data(), nullptr));
    }
}

}  // namespace linexport
