// A stand-in for TensorRT, with what run.cpp of a prepared folder calls. An "engine" is text: a line for
// each tensor, "in|out NAME SIZES", with %XX in the name as in an address, where -1 is the tokens of a call (at most 64), -2 those before it, -3 both.
// A call adds its tokens to every element of a state, and prints what it found, and the place of the token whose logits it gives.
#pragma once
#include <cstdint>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace nvinfer1 {

struct Dims {
    int32_t nbDims;
    int64_t d[8];
};
enum class TensorIOMode { kNONE, kINPUT, kOUTPUT };
enum class OptProfileSelector { kMIN, kOPT, kMAX };

struct ILogger {
    enum class Severity { kINTERNAL_ERROR, kERROR, kWARNING, kINFO };
    virtual void log(Severity severity, char const* text) noexcept = 0;
    virtual ~ILogger() = default;
};

struct Tensor {
    std::string name;
    bool input;
    Dims shape;
};

inline int64_t size(Dims const& shape) {
    int64_t found = 1;
    for (int32_t i = 0; i < shape.nbDims; ++i) found *= shape.d[i];
    return found;
}

struct IExecutionContext {
    std::vector<Tensor> tensors;
    std::map<std::string, Dims> shapes;
    std::map<std::string, void*> places;
    int profile = 0;

    static bool state(std::string const& name) { return name.find("past_") == 0 || name.find("present_") == 0; }
    Dims known(Dims shape, int64_t tokens, int64_t before) const {
        for (int32_t i = 0; i < shape.nbDims; ++i) {
            if (shape.d[i] == -1) shape.d[i] = tokens;
            if (shape.d[i] == -2) shape.d[i] = before;
            if (shape.d[i] == -3) shape.d[i] = before + tokens;
        }
        return shape;
    }
    // -1 where the shapes of inputs are not set, as TensorRT's.
    int64_t getMaxOutputSize(char const* name) const {
        int64_t found = -1;
        for (Tensor const& tensor : tensors) {
            if (tensor.input && !shapes.count(tensor.name)) return -1;
            if (tensor.name == name) found = size(known(tensor.shape, 64, 64)) * 4;
        }
        return found;
    }
    bool setOptimizationProfileAsync(int32_t number, cudaStream_t) { return profile = number, true; }
    // The last profile takes one token, as trtexec's arguments say.
    bool setInputShape(char const* name, Dims const& shape) {
        for (Tensor const& tensor : tensors)
            for (int32_t i = 0; tensor.name == name && i < shape.nbDims; ++i)
                if (tensor.shape.d[i] == -1 && shape.d[i] > (profile == 1 ? 1 : 64)) return false;
        return shapes[name] = shape, true;
    }
    bool setTensorAddress(char const* name, void* place) { return places[name] = place, true; }
    Dims getTensorShape(char const* name) const { return shapes.at(name); }
    bool enqueueV3(cudaStream_t) {
        int64_t tokens = 0, before = 0;
        for (Tensor const& tensor : tensors)
            for (int32_t i = 0; tensor.input && i < tensor.shape.nbDims; ++i) {
                if (tensor.shape.d[i] == -1) tokens = shapes.at(tensor.name).d[i];
                if (tensor.shape.d[i] == -2) before = shapes.at(tensor.name).d[i];
                if (tensor.shape.d[i] > 0 && tensor.shape.d[i] != shapes.at(tensor.name).d[i]) return false;
            }
        std::printf("profile %d, %lld tokens after %lld", profile, (long long)tokens, (long long)before);
        if (places.count("logits_at")) std::printf("; logits_at %lld", (long long)*static_cast<int64_t*>(places["logits_at"]));
        for (Tensor const& tensor : tensors) {
            if (tensor.input) continue;
            shapes[tensor.name] = known(tensor.shape, tokens, before);
            if (cudaStandInSizes()[places.at(tensor.name)] < size_t(size(shapes[tensor.name])) * 4) return false;
            if (!state(tensor.name)) continue;
            std::string const past = "past_" + tensor.name.substr(8);
            float const* from = static_cast<float*>(places.at(past));
            float* to = static_cast<float*>(places.at(tensor.name));
            int64_t const had = size(shapes.at(past)), has = size(shapes.at(tensor.name));
            for (int64_t i = 0; i < has; ++i) to[i] = (i < had ? from[i] : 0) + tokens;
            std::printf("; %s %g", past.c_str(), had ? from[had - 1] : -1);
        }
        std::printf("\n");
        return true;
    }
};

struct ICudaEngine {
    std::vector<Tensor> tensors;
    int32_t getNbOptimizationProfiles() const { return 2; }
    int32_t getNbIOTensors() const { return static_cast<int32_t>(tensors.size()); }
    char const* getIOTensorName(int32_t i) const { return tensors[i].name.c_str(); }
    TensorIOMode getTensorIOMode(char const* name) const {
        for (Tensor const& tensor : tensors)
            if (tensor.name == name) return tensor.input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
        return TensorIOMode::kNONE;
    }
    Dims getProfileShape(char const* name, int32_t, OptProfileSelector) const {
        for (Tensor const& tensor : tensors)
            if (tensor.name == name) return IExecutionContext{}.known(tensor.shape, 64, 64);
        return {-1, {}};
    }
    IExecutionContext* createExecutionContext() { return new IExecutionContext{tensors}; }
};

struct IPluginRegistry {
    void* loadLibrary(char const* name) {
        std::FILE* file = std::fopen(name, "r");
        if (file) std::fclose(file);
        return file;
    }
};

inline std::string unquoted(std::string const& text) {
    std::string found;
    for (size_t i = 0; i < text.size(); ++i) {
        bool const byte = text[i] == '%';
        found += byte ? static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16)) : text[i];
        i += byte ? 2 : 0;
    }
    return found;
}

struct IRuntime {
    IPluginRegistry registry;
    IPluginRegistry& getPluginRegistry() { return registry; }
    ICudaEngine* deserializeCudaEngine(void const* data, size_t length) {
        std::istringstream lines(std::string(static_cast<char const*>(data), length));
        auto* engine = new ICudaEngine;
        for (std::string line, kind; std::getline(lines, line);) {
            std::istringstream words(line);
            Tensor tensor{};
            words >> kind >> tensor.name;
            tensor.name = unquoted(tensor.name);
            tensor.input = kind == "in";
            while (words >> tensor.shape.d[tensor.shape.nbDims]) ++tensor.shape.nbDims;
            engine->tensors.push_back(tensor);
        }
        return engine->tensors.empty() ? nullptr : engine;
    }
};

inline IRuntime* createInferRuntime(ILogger&) { return new IRuntime; }

}  // namespace nvinfer1
