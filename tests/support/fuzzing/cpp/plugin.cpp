// The fields of a plugin as an engine gives them back, and all that TensorRT then calls before a GPU is there.
//
// An input is fields: a byte of the name's length, the name, two bytes of the content's length, and the content.
#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "description.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count);

using namespace nvinfer1;

std::vector<std::string> const& dictionary() {
    static std::vector<std::string> const words{"[", "{", "\"", "null", "\x06launch", "\x08" "binaries", "\"batch\"", "\"length\"",
        "\"shape\":[1,1,1,1,1,1,1,1,1]", "\"type\":\"fp32\"", std::string(3, '\0'), ",", "]", "}"};
    return words;
}

namespace {

class Expression : public IDimensionExpr {};

struct Builder : apiv::VExprBuilder {
    Expression made;
    IDimensionExpr const* constant(int64_t) override { return &made; }
    IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override { return &made; }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override { return &made; }
};

struct ExprBuilder : IExprBuilder {
    explicit ExprBuilder(Builder& builder) { mImpl = &builder; }
};

struct Fields {
    std::vector<std::string> texts;
    std::vector<PluginField> all;

    explicit Fields(std::string const& input) {
        texts.reserve(input.size() + 1);
        for (size_t at = 0; at < input.size();) {
            std::string const name = taken(input, at, static_cast<uint8_t>(input[at++]));
            size_t const low = at < input.size() ? static_cast<uint8_t>(input[at++]) : 0;
            size_t const high = at < input.size() ? static_cast<uint8_t>(input[at++]) : 0;
            std::string const content = taken(input, at, low | high << 8);
            if (texts.size() + 2 > texts.capacity()) return;
            texts.push_back(name), texts.push_back(content);
            all.push_back({texts[texts.size() - 2].c_str(), texts.back().data(), PluginFieldType::kCHAR,
                static_cast<int32_t>(texts.back().size())});
        }
    }
    static std::string taken(std::string const& input, size_t& at, size_t count) {
        std::string const found = input.substr(std::min(at, input.size()), count);
        at += found.size();
        return found;
    }
};

void use(IPluginV3& plugin) {
    auto& build = *static_cast<IPluginV3OneBuild*>(plugin.getCapabilityInterface(PluginCapabilityType::kBUILD));
    auto& runtime = *static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    int32_t const outputs = build.getNbOutputs();
    for (int32_t inputs : {1, 3, 7})
        for (int32_t rank : {0, 3, 8}) {
            std::vector<DynamicPluginTensorDesc> tensors(static_cast<size_t>(inputs + outputs));
            for (DynamicPluginTensorDesc& one : tensors) {
                one.desc.dims.nbDims = one.max.nbDims = rank;
                for (int32_t i = 0; i < 8; ++i) one.desc.dims.d[i] = one.max.d[i] = i < rank ? 2 : -1;
            }
            auto const* const results = tensors.data() + inputs;
            build.configurePlugin(tensors.data(), inputs, results, outputs);
            build.getWorkspaceSize(tensors.data(), inputs, results, outputs);
            for (int32_t i = 0; i < inputs + outputs; ++i)
                build.supportsFormatCombination(i, tensors.data(), inputs, outputs);
            std::vector<DataType> types(static_cast<size_t>(outputs));
            build.getOutputDataTypes(types.data(), outputs, nullptr, 0);
            Builder builder;
            ExprBuilder expressions(builder);
            std::vector<DimsExprs> given(static_cast<size_t>(inputs)), made(static_cast<size_t>(outputs));
            for (DimsExprs& one : given) {
                one.nbDims = rank;
                for (auto& size : one.d) size = &builder.made;
            }
            build.getOutputShapes(given.data(), inputs, nullptr, 0, made.data(), outputs, expressions);
            std::vector<PluginTensorDesc> descs;
            for (DynamicPluginTensorDesc const& one : tensors) descs.push_back(one.desc);
            runtime.onShapeChange(descs.data(), inputs, descs.data() + inputs, outputs);
        }
    runtime.getFieldsToSerialize();
    delete plugin.clone();
}

}  // namespace

void fuzz(std::string const& input) {
    Fields const fields(input);
    PluginFieldCollection const all{static_cast<int32_t>(fields.all.size()), fields.all.data()};
    int32_t count = 0;
    auto* const creator = static_cast<IPluginCreatorV3One*>(getCreators(count)[0]);
    std::unique_ptr<IPluginV3> const plugin(creator->createPlugin("", &all, TensorRTPhase::kRUNTIME));
    if (plugin) use(*plugin);
}
