// A plugin's life through TensorRT's interfaces, behind C functions, for programs without TensorRT: checks
// on a GPU, and tests on a stand-in for its driver.
//
//     open     as while an engine is built: created from a node's fields, asked for formats and for shapes of
//              outputs in terms of those of inputs, configured, asked for workspace, serialised. As when it is opened: created again from these fields,
//              a clone attached to a context
//     enqueue  told the shapes, then launched
//
// Errors are written to `error`, and -1 or null is returned.
#include <NvInferRuntime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "description.h"

extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

namespace {

using namespace nvinfer1;
using linexport::Error;

struct LastError final : ILogger {
    std::string text;
    void log(Severity, AsciiChar const* said) noexcept override { text = said; }
} lastError;

struct Finder final : ILoggerFinder {
    ILogger* findLogger() noexcept override { return &lastError; }
} finder;

void require(bool held, char const* what) {
    if (!held) throw Error(std::string(what) + (lastError.text.empty() ? "" : ": ") + lastError.text);
}

template <typename Capability>
Capability& capability(IPluginV3& plugin, PluginCapabilityType type) {
    auto* const found = static_cast<Capability*>(plugin.getCapabilityInterface(type));
    require(found, "a plugin has no such capability");
    return *found;
}

IPluginCreatorV3One& creatorOf(std::string const& name) {
    int32_t count = 0;
    IPluginCreatorInterface* const* const creators = getCreators(count);
    for (int32_t i = 0; i < count; ++i) {
        auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
        if (name == creator->getPluginName()) return *creator;
    }
    throw Error("no plugin is called " + name);
}

DataType typeOf(std::string const& type) {
    if (type == "fp32") return DataType::kFLOAT;
    if (type == "fp16") return DataType::kHALF;
    return type == "bf16" ? DataType::kBF16 : DataType::kBOOL;
}

// The tensors of a node: its inputs, those left out as copies of the first, then its outputs.
std::vector<PluginTensorDesc> tensorsOf(linexport::Description const& node, int64_t batch, int64_t length) {
    linexport::Sizes const sizes{{"batch", batch}, {"length", length}};
    std::vector<PluginTensorDesc> found;
    for (auto const* const side : {&node.inputs, &node.outputs})
        for (linexport::Tensor const& given : *side) {
            linexport::Tensor const& tensor = given.present ? given : node.inputs.at(0);
            PluginTensorDesc desc{};
            for (linexport::Size const& size : tensor.shape)
                desc.dims.d[desc.dims.nbDims++] = size.symbol.empty() ? size.number : sizes.at(size.symbol);
            desc.type = typeOf(tensor.type);
            desc.format = TensorFormat::kLINEAR;
            found.push_back(desc);
        }
    return found;
}

struct Opened {
    linexport::Description node;
    std::vector<PluginTensorDesc> tensors;
    std::unique_ptr<IPluginV3> built, attached;

    int32_t inputs() const { return static_cast<int32_t>(node.inputs.size()); }
    int32_t outputs() const { return static_cast<int32_t>(node.outputs.size()); }

    // Of the plugin while it is built, with these as the largest sizes.
    int64_t workspace(int64_t batch, int64_t length) const {
        std::vector<DynamicPluginTensorDesc> const largest = dynamic(batch, length);
        auto& build = capability<IPluginV3OneBuild>(*built, PluginCapabilityType::kBUILD);
        auto const* const results = largest.data() + inputs();
        require(!build.configurePlugin(largest.data(), inputs(), results, outputs()), "configurePlugin failed");
        return static_cast<int64_t>(build.getWorkspaceSize(largest.data(), inputs(), results, outputs()));
    }
    std::vector<DynamicPluginTensorDesc> dynamic(int64_t batch, int64_t length) const {
        std::vector<DynamicPluginTensorDesc> found;
        for (PluginTensorDesc const& desc : tensorsOf(node, batch, length)) {
            DynamicPluginTensorDesc one{};
            one.desc = desc;
            one.min = one.max = one.opt = desc.dims;
            found.push_back(one);
        }
        return found;
    }
};

// Every tensor in its type and no other, and outputs of the types described.
void checkFormats(Opened const& node) {
    auto& build = capability<IPluginV3OneBuild>(*node.built, PluginCapabilityType::kBUILD);
    std::vector<DynamicPluginTensorDesc> tensors = node.dynamic(1, 1);
    for (size_t i = 0; i < tensors.size(); ++i) {
        auto const fits = [&] {
            return build.supportsFormatCombination(
                static_cast<int32_t>(i), tensors.data(), node.inputs(), node.outputs());
        };
        require(fits(), "a plugin refuses the type of its own tensor");
        DataType const type = tensors[i].desc.type;
        tensors[i].desc.type = DataType::kINT8;
        require(!fits(), "a plugin takes any type");
        tensors[i].desc.type = type;
    }
    std::vector<DataType> types(node.outputs()), given(node.inputs());
    require(build.getNbOutputs() == node.outputs(), "a plugin has another number of outputs");
    require(!build.getOutputDataTypes(types.data(), node.outputs(), given.data(), node.inputs()), "no types");
    for (int32_t i = 0; i < node.outputs(); ++i)
        require(types[i] == tensors[node.inputs() + i].desc.type, "an output has another type");
}

// A size while an engine is built: a number, or a symbol, which has none and is known by its place.
struct Expression final : IDimensionExpr {
    int64_t number = -1;
};

// Numbers as TensorRT makes them for a plugin. Ours pass sizes on and compute none.
struct Expressions final : apiv::VExprBuilder {
    std::map<int64_t, Expression> numbers;
    std::map<std::string, Expression> symbols;

    IDimensionExpr const* constant(int64_t value) override {
        numbers[value].number = value;
        return &numbers[value];
    }
    IDimensionExpr const* operation(
        DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override {
        throw Error("a plugin computes a size");
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override {
        throw Error("a plugin has a size that depends on values");
    }
    DimsExprs of(std::vector<linexport::Size> const& shape) {
        DimsExprs found{};
        for (linexport::Size const& size : shape)
            found.d[found.nbDims++] = size.symbol.empty() ? constant(size.number) : &symbols[size.symbol];
        return found;
    }
};

struct Builder final : IExprBuilder {
    explicit Builder(Expressions& expressions) { mImpl = &expressions; }
};

// Shapes of outputs: the numbers and the symbols, of inputs, that the description has.
void checkShapes(Opened const& node) {
    auto& build = capability<IPluginV3OneBuild>(*node.built, PluginCapabilityType::kBUILD);
    Expressions known;
    Builder builder(known);
    std::vector<DimsExprs> given, found(node.outputs());
    for (linexport::Tensor const& tensor : node.node.inputs)
        given.push_back(known.of(tensor.present ? tensor.shape : node.node.inputs.at(0).shape));
    require(!build.getOutputShapes(given.data(), node.inputs(), nullptr, 0, found.data(), node.outputs(), builder),
        "getOutputShapes failed");
    for (int32_t i = 0; i < node.outputs(); ++i) {
        DimsExprs const wanted = known.of(node.node.outputs[i].shape);
        require(std::equal(wanted.d, wanted.d + wanted.nbDims, found[i].d, found[i].d + found[i].nbDims),
            "an output has another shape");
    }
}

std::unique_ptr<Opened> opened(char const* launch, char const* binaries) {
    setLoggerFinder(&finder);
    lastError.text.clear();
    auto made = std::make_unique<Opened>();
    made->node = linexport::parse(launch, binaries);
    IPluginCreatorV3One& creator = creatorOf(made->node.opType);
    // As the parser hands attributes on: with a zero byte behind.
    PluginField const fields[] = {
        {"launch", launch, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(launch)) + 1},
        {"binaries", binaries, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(binaries)) + 1}};
    PluginFieldCollection const given{2, fields};
    made->built.reset(creator.createPlugin("node", &given, TensorRTPhase::kBUILD));
    require(made->built != nullptr, "createPlugin failed");
    checkFormats(*made);
    checkShapes(*made);
    auto& runtime = capability<IPluginV3OneRuntime>(*made->built, PluginCapabilityType::kRUNTIME);
    PluginFieldCollection const* const kept = runtime.getFieldsToSerialize();
    std::unique_ptr<IPluginV3> const again(creator.createPlugin("node", kept, TensorRTPhase::kRUNTIME));
    require(again != nullptr, "createPlugin failed for an engine that is opened");
    std::unique_ptr<IPluginV3> const copy(again->clone());
    require(copy != nullptr, "clone failed");
    auto& second = capability<IPluginV3OneRuntime>(*copy, PluginCapabilityType::kRUNTIME);
    made->attached.reset(second.attachToContext(nullptr));
    require(made->attached != nullptr, "attachToContext failed");
    return made;
}

template <typename Result, typename Function>
Result told(Function const& function, Result failed, char* error, size_t size) {
    try {
        return function();
    } catch (std::exception const& found) {
        std::strncpy(error, found.what(), size - 1);
        error[size - 1] = 0;
        return failed;
    }
}

}  // namespace

extern "C" {

void* linexport_open(char const* launch, char const* binaries, char* error, size_t size) {
    return told([&]() -> void* { return opened(launch, binaries).release(); }, static_cast<void*>(nullptr),
        error, size);
}

int64_t linexport_scratch(void const* node, int64_t batch, int64_t length, char* error, size_t size) {
    return told([&] { return static_cast<Opened const*>(node)->workspace(batch, length); }, int64_t{-1}, error,
        size);
}

// Shapes of the inputs one after another, `ranks` long; addresses of the inputs, then of the outputs.
int linexport_enqueue(void* node, int64_t const* shapes, int const* ranks, int inputs,
    void* const* addresses, int, void* workspace, void* stream, char* error, size_t size) {
    return told(
        [&] {
            Opened& of = *static_cast<Opened*>(node);
            std::vector<PluginTensorDesc> tensors = tensorsOf(of.node, 1, 1);
            for (int i = 0; i < inputs; shapes += ranks[i++]) {
                tensors[i].dims.nbDims = ranks[i];
                std::memcpy(tensors[i].dims.d, shapes, ranks[i] * sizeof *shapes);
            }
            auto& runtime = capability<IPluginV3OneRuntime>(*of.attached, PluginCapabilityType::kRUNTIME);
            lastError.text.clear();
            PluginTensorDesc const* const results = tensors.data() + inputs;
            require(!runtime.onShapeChange(tensors.data(), inputs, results, of.outputs()), "onShapeChange failed");
            require(!runtime.enqueue(tensors.data(), results, addresses, addresses + inputs, workspace,
                        static_cast<cudaStream_t>(stream)),
                "enqueue failed");
            return 0;
        },
        -1, error, size);
}

void linexport_close(void* node) { delete static_cast<Opened*>(node); }
}
