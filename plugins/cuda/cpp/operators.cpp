// linexport's GPU kernels as ONNX Runtime's custom operators: see linexport/plugins/cuda/library.py.
//
// One class runs any op: what it needs is in the description that its node carries. RegisterCustomOps is
// the entry that ONNX Runtime calls (SessionOptions.register_custom_ops_library in Python).
#include <algorithm>
#include <array>
#include <memory>

#include "launcher.h"
#include "onnxruntime_call.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace linexport {
namespace {

char constexpr domainName[] = "linexport";
char constexpr const* operators[] = {
    "LinearAttention", "CausalConvTokens", "FeatureMap", "StabilizedExp", "LinearAttentionLayer"};
size_t constexpr mostInputs = 32, mostOutputs = 8;

int elementType(std::string const& type) {
    if (type == "fp32") return kFloat;
    if (type == "fp16") return kFloat16;
    if (type == "bf16") return kBFloat16;
    if (type == "i8") return kBool;
    throw Error("a node has the unknown type " + type);
}

template <typename Function>
OrtStatus* guarded(OrtApi api, Function const& function) {
    try {
        function();
        return nullptr;
    } catch (std::exception const& error) {
        return call<CreateStatus>(api, int{kFail}, error.what());
    }
}

std::string text(OrtApi api, OrtKernelInfo const* info, char const* name) {
    size_t size = 0;
    if (!found<KernelInfoGetAttributeString>(api, info, name, static_cast<char*>(nullptr), &size))
        throw Error(std::string("a node of the linexport domain has no attribute ") + name +
            ": it was not converted for this library");
    std::string value(size, '\0');
    checked<KernelInfoGetAttributeString>(api, info, name, value.data(), &size);
    value.resize(value.find_last_not_of('\0') + 1);
    return value;
}

// Memory of the device for one call. It is returned when the kernels are launched, not when they are done: it is
// of their stream, and who gets it next there comes after them.
class Workspace {
public:
    Workspace(OrtApi api, OrtAllocator* allocator, OrtKernelContext* context, void* stream, int64_t bytes)
        : mApi(api), mAllocator(allocator) {
        if (!bytes) return;
        size_t const size = static_cast<size_t>(bytes);
        if (!stream) {
            checked<AllocatorAlloc>(api, allocator, size, &mAddress);
            return;
        }
        OrtMemoryInfo const* info = nullptr;
        checked<AllocatorGetInfo>(api, allocator, &info);
        checked<KernelContextGetScratchBuffer>(api, context, info, size, &mAddress);
    }
    Workspace(Workspace const&) = delete;
    Workspace& operator=(Workspace const&) = delete;
    ~Workspace() {
        if (mAddress) found<AllocatorFree>(mApi, mAllocator, mAddress);
    }
    void* address() const { return mAddress; }

private:
    OrtApi mApi;
    OrtAllocator* mAllocator;
    void* mAddress = nullptr;
};

// A node of a session.
class Kernel {
public:
    Kernel(OrtApi api, OrtKernelInfo const* info)
        : mApi(api),
          mDescription(described(text(api, info, "launch"), text(api, info, "binaries"))),
          mLauncher(*mDescription) {
        if (mDescription->inputs.size() > mostInputs || mDescription->outputs.size() > mostOutputs)
            throw Error(mDescription->opType + " has more tensors than this library takes");
        checked<KernelInfoGetAllocator>(api, info, 0, &mAllocator);
    }
    Kernel(Kernel const&) = delete;
    Kernel& operator=(Kernel const&) = delete;
    ~Kernel() { call<ReleaseAllocator>(mApi, mAllocator); }

    void compute(OrtKernelContext* context) const {
        std::vector<std::vector<int64_t>> shapes;
        std::vector<void const*> addresses;
        for (size_t i = 0; i < mDescription->inputs.size(); ++i) {
            shapes.emplace_back();
            addresses.push_back(input(context, i, shapes.back()));
        }
        Sizes const sizes = mDescription->sizes(shapes);
        for (size_t i = 0; i < mDescription->outputs.size(); ++i) addresses.push_back(output(context, i, sizes));
        void* stream = nullptr;
        checked<KernelContextGetGPUComputeStream>(mApi, context, &stream);
        Workspace const workspace(mApi, mAllocator, context, stream, mLauncher.scratch(sizes));
        mLauncher.enqueue(shapes, addresses, workspace.address(), static_cast<DriverStream>(stream));
    }

private:
    void const* input(OrtKernelContext* context, size_t place, std::vector<int64_t>& shape) const {
        Tensor const& tensor = mDescription->inputs[place];
        if (!tensor.present) return nullptr;
        OrtValue const* value = nullptr;
        checked<KernelContextGetInput>(mApi, context, place, &value);
        if (!value) throw Error(mDescription->opType + ": " + tensor.name + " is missing");
        OrtTensorTypeAndShapeInfo* info = nullptr;
        checked<GetTensorTypeAndShape>(mApi, value, &info);
        int type = 0;
        size_t rank = 0;
        bool read = found<GetTensorElementType>(mApi, info, &type) && found<GetDimensionsCount>(mApi, info, &rank);
        shape.resize(rank);
        read = read && found<GetDimensions>(mApi, info, shape.data(), rank);
        call<ReleaseTensorTypeAndShapeInfo>(mApi, info);
        if (!read || type != elementType(tensor.type))
            throw Error(mDescription->opType + ": " + tensor.name + " is not of type " + tensor.type);
        void* data = nullptr;
        checked<GetTensorMutableData>(mApi, const_cast<OrtValue*>(value), &data);
        return data;
    }

    void const* output(OrtKernelContext* context, size_t place, Sizes const& sizes) const {
        Tensor const& tensor = mDescription->outputs[place];
        std::vector<int64_t> shape;
        for (Size const& size : tensor.shape)
            shape.push_back(size.symbol.empty() ? size.number : sizes.at(size.symbol));
        OrtValue* value = nullptr;
        checked<KernelContextGetOutput>(mApi, context, place, shape.data(), shape.size(), &value);
        if (!value) throw Error(mDescription->opType + ": " + tensor.name + " is missing");
        void* data = nullptr;
        checked<GetTensorMutableData>(mApi, value, &data);
        return data;
    }

    OrtApi mApi;
    std::shared_ptr<Description const> mDescription;
    Launcher mLauncher;
    OrtAllocator* mAllocator = nullptr;
};

struct Opened {
    OrtApi api;
    Kernel kernel;
};

// An op whose first input and output have one type, and whose other outputs are in float32.
struct Operator : OrtCustomOp {
    Operator(char const* name, int activation) : OrtCustomOp{}, name(name), activation(activation) {
        version = kApiVersion;
        GetName = [](OrtCustomOp const* op) { return of(op).name; };
        GetExecutionProviderType = [](OrtCustomOp const*) { return LINEXPORT_EXECUTION_PROVIDER; };
        GetInputType = [](OrtCustomOp const* op, size_t i) { return i ? kUndefined : of(op).activation; };
        GetInputTypeCount = [](OrtCustomOp const*) { return mostInputs; };
        GetOutputType = [](OrtCustomOp const* op, size_t i) { return i ? kFloat : of(op).activation; };
        GetOutputTypeCount = [](OrtCustomOp const*) { return mostOutputs; };
        GetInputCharacteristic = [](OrtCustomOp const*, size_t i) { return i ? kOptional : kRequired; };
        GetOutputCharacteristic = [](OrtCustomOp const*, size_t i) { return i ? kOptional : kRequired; };
        GetInputMemoryType = [](OrtCustomOp const*, size_t) { return 0; };
        GetStartVersion = [](OrtCustomOp const*) { return 1; };
        GetEndVersion = [](OrtCustomOp const*) { return 1; };
        CreateKernelV2 = [](OrtCustomOp const*, OrtApi api, OrtKernelInfo const* info, void** made) {
            return guarded(api, [&] { *made = new Opened{api, {api, info}}; });
        };
        KernelComputeV2 = [](void* opened, OrtKernelContext* context) {
            Opened const& own = *static_cast<Opened*>(opened);
            return guarded(own.api, [&] { own.kernel.compute(context); });
        };
        KernelDestroy = [](void* opened) { delete static_cast<Opened*>(opened); };
    }
    static Operator const& of(OrtCustomOp const* op) { return *static_cast<Operator const*>(op); }

    char const* name;
    int activation;
};

// It lives as long as the process: sessions refer to it.
OrtCustomOpDomain* domain(OrtApi api) {
    OrtCustomOpDomain* made = nullptr;
    checked<CreateCustomOpDomain>(api, domainName, &made);
    for (char const* name : operators)
        for (int activation : {kFloat, kFloat16, kBFloat16})
            checked<CustomOpDomainAdd>(api, made, new Operator(name, activation));
    return made;
}

}  // namespace
}  // namespace linexport

// Digest of the sources it was built from.
EXPORTED char const* linexport_sources() { return LINEXPORT_SOURCES; }

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, OrtApiBase const* base) {
    using namespace linexport;
    OrtApi const api = base->GetApi(kApiVersion);
    if (!api)
        return refuse(base,
            "linexport's CUDA library needs ONNX Runtime 1." + std::to_string(kApiVersion) +
                " or newer; this is " + base->GetVersionString());
    return guarded(api, [&] {
        static OrtCustomOpDomain* const made = domain(api);
        checked<AddCustomOpDomain>(api, options, made);
    });
}
