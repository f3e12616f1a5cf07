// The engine of run.cpp by ONNX Runtime on a CPU: an "engine" is the folder of an artifact. ORT_LIBRARY names the library.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "json.h"
#include "onnxruntime_api.h"

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline int const cudaSuccess = 0;
inline int cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind) { return std::memcpy(to, from, bytes), 0; }

namespace linexport {

class Engine {
public:
    explicit Engine(std::string const& folder) {
        std::ifstream file(folder + "/manifest.json");
        std::ostringstream text;
        text << file.rdbuf();
        mManifest = JsonReader::read(text.str());
        void* library = dlopen(std::getenv("ORT_LIBRARY"), RTLD_NOW);
        if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(5);
        mApi = reinterpret_cast<OrtApiBase const* (*)()>(dlsym(library, "OrtGetApiBase"))()->GetApi(kApiVersion);
        OrtEnv* environment;
        OrtSessionOptions* options;
        call<CreateEnv>(kWarning, "run", &environment);
        call<CreateSessionOptions>(&options);
        call<CreateSession>(environment, (folder + "/model.onnx").c_str(), options, &mSession);
        call<CreateCpuMemoryInfo>(kArena, kDefault, &mMemory);
        mTokens.resize(1 << 16), mOnes.assign(1 << 16, 1);
        reset();
    }

    void reset() {
        for (Json const& state : mManifest["states"].list) {
            std::vector<int64_t>& shape = mShapes[state["past"].text] = {1};
            int64_t size = 1, grows = state["grows"].kind == Json::kNull ? -1 : int64_t(state["grows"].number);
            auto const& dims = state["shape"].list;
            for (int64_t i = 1; i < int64_t(dims.size()); ++i) shape.push_back(i == grows ? 0 : int64_t(dims[i].number)), size *= shape.back();
            bool const integers = state["dtype"].text == "int64";
            auto& bytes = mStarts[state["past"].text];
            bytes.assign(std::max<int64_t>(size, 1) * (integers ? 8 : 4), 0);
            float const first = float(state["initial"].number);
            for (int64_t i = 0; !integers && i < size; ++i) std::memcpy(&bytes[i * 4], &first, 4);
            OrtValue* value;
            call<CreateTensorWithDataAsOrtValue>(mMemory, static_cast<void*>(bytes.data()), size_t(size * (integers ? 8 : 4)), shape.data(), shape.size(), integers ? kInt64 : kFloat, &value);
            mPast[state["past"].text] = value;
        }
    }

    int64_t context() const { return std::getenv("CONTEXT") ? std::atoll(std::getenv("CONTEXT")) : INT64_MAX; }

    void* operator[](std::string const& name) {
        return name == mManifest["inputs"].list[0]["name"].text ? static_cast<void*>(mTokens.data()) : mLogits;
    }

    void run(int64_t tokens) {
        std::vector<char const*> names, wanted{mManifest["outputs"].list[0]["name"].text.c_str()};
        std::vector<OrtValue*> values, made;
        int64_t const shape[] = {1, tokens};
        for (Json const& input : mManifest["inputs"].list) {
            names.push_back(input["name"].text.c_str());
            if (mPast.count(names.back())) { values.push_back(mPast[names.back()]); continue; }
            bool const first = names.size() == 1;
            OrtValue* value;
            call<CreateTensorWithDataAsOrtValue>(mMemory, static_cast<void*>(first ? mTokens.data() : mOnes.data()), size_t(tokens * 8), &shape[0], size_t{2}, kInt64, &value);
            values.push_back(value);
        }
        for (Json const& state : mManifest["states"].list) wanted.push_back(state["present"].text.c_str());
        made.resize(wanted.size());
        call<Run>(mSession, static_cast<OrtRunOptions const*>(nullptr), names.data(), values.data(), values.size(), wanted.data(), wanted.size(), made.data());
        call<GetTensorMutableData>(made[0], &mLogits);
        mCount = tokens * int64_t(mManifest["outputs"].list[0]["shape"].list.back().number);
        size_t n = 0;
        for (Json const& state : mManifest["states"].list) mPast[state["past"].text] = made[++n];
        std::fprintf(stderr, "call of %lld\n", static_cast<long long>(tokens));
    }

    int64_t count(char const*) const { return mCount; }

private:
    template <int Place, typename... Arguments>
    void call(Arguments... arguments) {
        auto function = reinterpret_cast<typename Entry<Place>::Type>(mApi[Place]);
        if (OrtStatus* status = function(arguments...))
            std::fprintf(stderr, "ONNX Runtime: %s\n", reinterpret_cast<Entry<GetErrorMessage>::Type>(mApi[GetErrorMessage])(status)), std::exit(5);
    }

    Json mManifest;
    void const* const* mApi;
    OrtSession* mSession;
    OrtMemoryInfo* mMemory;
    std::vector<int64_t> mTokens, mOnes;
    std::map<std::string, std::vector<int64_t>> mShapes;
    std::map<std::string, std::vector<unsigned char>> mStarts;
    std::map<std::string, OrtValue*> mPast;
    void* mLogits = nullptr;
    int64_t mCount = 0;
};

}  // namespace linexport
