// Labels of tensors inside a program without Python, for a run of whence (docs/labels.md). C++11, no dependencies.
//
//     #include <whence_label.h>                                    // g++ -I "$(whence include)"
//     WHENCE_LABEL("qkv pos1", ptr, shape, "float16");             // shape: {2, 3}, std::vector<int64_t>, at::IntArrayRef ...
//     WHENCE_LABEL("qkv pos1", ptr, shape, dtype, "reference");    // side; the default is WHENCE_LABEL_SIDE
//     WHENCE_LABEL("qkv pos1", ptr, shape, dtype, "target", id);   // id: as whence.label takes it
//     WHENCE_TASK("turn 1");                                       // until the next; else the one of the Python around it
//
// ptr: elements in C order. dtype: a name ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64" ...) or a whence::DType.
// A null pointer is a label that says so. Without a run nothing is done; an error never leaves a label. Any thread may call it.
// Host memory; with WHENCE_LABEL_CUDA or WHENCE_LABEL_HIP defined before inclusion memory of the device too: it waits for the device.
// WHENCE_LABEL_OFF: labels compile to nothing.
#ifndef WHENCE_LABEL_H
#define WHENCE_LABEL_H

#ifndef WHENCE_LABEL_SIDE
#define WHENCE_LABEL_SIDE "target"
#endif

#ifdef WHENCE_LABEL_OFF
#define WHENCE_LABEL(...) ((void)0)
#define WHENCE_TASK(...) ((void)0)
#else
#define WHENCE_LABEL(...) ::whence::label(__VA_ARGS__)
#define WHENCE_TASK(...) ::whence::task(__VA_ARGS__)

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#ifdef _WIN32
#include <process.h>
#else
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(WHENCE_LABEL_CUDA)
#include <cuda_runtime_api.h>
#elif defined(WHENCE_LABEL_HIP)
#include <hip/hip_runtime_api.h>
#endif

namespace whence {

struct DType {
    const char* name;
    int code;  // aclDataType, -1 where it has none
    unsigned bytes;
};

namespace detail {

inline DType dtype_of(const std::string& name) {
    static const DType known[] = {
        {"float32", 0, 4},        {"float16", 1, 2},         {"int8", 2, 1},           {"int32", 3, 4},
        {"uint8", 4, 1},          {"int16", 6, 2},           {"uint16", 7, 2},         {"uint32", 8, 4},
        {"int64", 9, 8},          {"uint64", 10, 8},         {"float64", 11, 8},       {"bool", 12, 1},
        {"complex64", 16, 8},     {"complex128", 17, 16},    {"bfloat16", 27, 2},      {"float8_e4m3fn", -1, 1},
        {"float8_e5m2", -1, 1},   {"float8_e4m3fnuz", -1, 1}, {"float8_e5m2fnuz", -1, 1}, {"float8_e8m0fnu", -1, 1},
    };
    static const char* const also[][2] = {
        {"float", "float32"}, {"double", "float64"}, {"half", "float16"},  {"bf16", "bfloat16"}, {"fp16", "float16"},
        {"fp32", "float32"},  {"fp64", "float64"},   {"int", "int32"},     {"long", "int64"},    {"fp8", "float8_e4m3fn"},
    };
    std::string wanted = name.compare(0, 6, "torch.") == 0 ? name.substr(6) : name;
    for (const auto& other : also)
        if (wanted == other[0]) wanted = other[1];
    for (const DType& one : known)
        if (wanted == one.name) return one;
    return DType{nullptr, -1, 0};
}

// A value for one line of a header: what would break the line is written as %XX.
inline std::string escaped(const std::string& text) {
    static const char* const digits = "0123456789ABCDEF";
    std::string out;
    for (unsigned char c : text) {
        if (c < 0x20 || c == 0x7f || c == '%') {
            out += '%';
            out += digits[c >> 4];
            out += digits[c & 15];
        } else {
            out += static_cast<char>(c);
        }
    }
    return out;
}

inline std::string variable(const char* name) {
    const char* found = std::getenv(name);
    return found ? found : "";
}

inline long process() {
#ifdef _WIN32
    return static_cast<long>(_getpid());
#else
    return static_cast<long>(getpid());
#endif
}

inline std::string rank() {
    for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK"}) {
        const std::string found = variable(name);
        if (!found.empty() && found.find_first_not_of("0123456789") == std::string::npos) return found;
    }
    return "0";
}

// One file per process and shared library, to which whole labels are appended.
struct Writer {
    std::mutex lock;
    std::FILE* file = nullptr;
    std::string folder;
    long pid = 0;
    bool failed = false;
    std::string task;
    bool own_task = false;
#ifndef _WIN32
    dev_t device = 0;
    ino_t inode = 0;
#endif
    std::map<std::string, unsigned long> seen;

    // A program may close every descriptor and give the number to a file of its own: nothing is written there, nor closed.
    bool ours() const {
#ifdef _WIN32
        return true;
#else
        struct stat now;
        return fstat(fileno(file), &now) == 0 && now.st_dev == device && now.st_ino == inode;
#endif
    }

    bool open(const std::string& to) {
        const long now = process();
        const bool held = file && pid == now && ours();
        if (held && folder == to) return true;
        if (held) std::fclose(file);  // after a fork it is the parent's
        if (pid != now) seen.clear();
        file = nullptr;
        folder = to;
        pid = now;
#ifndef _WIN32
        char host[256] = "host";
        if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
        host[sizeof host - 1] = '\0';
#else
        const std::string name = variable("COMPUTERNAME");
        const char* host = name.c_str();
#endif
        char path[64];
        std::snprintf(path, sizeof path, "-%ld-%llx.bin", now, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(this)));
#ifdef _WIN32
        file = std::fopen((to + "/" + host + path).c_str(), "ab");
#else
        file = std::fopen((to + "/" + host + path).c_str(), "abe");  // not inherited
        struct stat opened;
        if (file && fstat(fileno(file), &opened) == 0) {
            device = opened.st_dev;
            inode = opened.st_ino;
        }
#endif
        failed = file == nullptr;
        if (failed) std::fprintf(stderr, "whence: labels of process %ld cannot be written to %s\n", now, to.c_str());
        return !failed;
    }
};

inline Writer& writer() {
    static Writer* const one = new Writer;  // never destroyed: labels may come from destructors
    return *one;
}

// Elements of the device are copied to `held`; returns where to read them. why: set where they cannot be read.
inline const void* readable(const void* data, std::size_t bytes, std::vector<char>& held, std::string& why) {
#if defined(WHENCE_LABEL_CUDA)
    cudaPointerAttributes found;
    if (cudaPointerGetAttributes(&found, data) != cudaSuccess) {
        (void)cudaGetLastError();
        return data;
    }
    if (found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged) return data;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(cudaStreamLegacy, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
        (void)cudaGetLastError();
        why = "a CUDA graph is being recorded: reading the tensor would break it";
        return nullptr;
    }
    held.resize(bytes);
    if (cudaDeviceSynchronize() != cudaSuccess || cudaMemcpy(held.data(), data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) {
        why = std::string("cannot be copied from the device: ") + cudaGetErrorString(cudaGetLastError());
        return nullptr;
    }
    return held.data();
#elif defined(WHENCE_LABEL_HIP)
    hipPointerAttribute_t found;
    if (hipPointerGetAttributes(&found, data) != hipSuccess) {
        (void)hipGetLastError();
        return data;
    }
    if (found.devicePointer == nullptr) return data;
    held.resize(bytes);
    if (hipDeviceSynchronize() != hipSuccess || hipMemcpy(held.data(), data, bytes, hipMemcpyDeviceToHost) != hipSuccess) {
        why = std::string("cannot be copied from the device: ") + hipGetErrorString(hipGetLastError());
        return nullptr;
    }
    return held.data();
#else
    (void)bytes;
    (void)held;
    (void)why;
    return data;
#endif
}

inline void write(const std::string& folder, const char* name, const void* data, const std::vector<std::int64_t>& shape, const DType& dtype,
                  const std::string& given, const char* side, const char* id) {
    std::string why;
    std::size_t bytes = dtype.bytes;
    std::string dims;
    for (std::int64_t extent : shape) {
        dims += (dims.empty() ? "" : ",") + std::to_string(extent);
        if (extent < 0) why = "the shape has a negative extent";
        bytes *= extent < 0 ? 0 : static_cast<std::size_t>(extent);
    }
    if (why.empty() && !dtype.name) why = "elements of " + given + " are not known to whence";
    if (why.empty() && !data && bytes) why = "the pointer is null";
    std::vector<char> held;
    if (why.empty() && bytes) data = readable(data, bytes, held, why);
    if (!why.empty()) bytes = 0;

    Writer& to = writer();
    std::lock_guard<std::mutex> locked(to.lock);
    if ((to.failed && to.pid == process()) || !to.open(folder)) return;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const std::string task = to.own_task ? to.task : variable("WHENCE_TASK");
    const std::string key = task + '\n' + (side ? side : "") + '\n' + (name ? name : "");
    const unsigned long occurrence = to.seen[key]++;
    std::string head = "$Version=1.0\n$Object.Count=";
    head += why.empty() ? "1" : "0";
    head += "\n$Object.Length=" + std::to_string(bytes) + "\nformat=2\ndtype=" + std::to_string(dtype.code) + "\ndims=" + dims + "\n";
    head += "whence.dtype=" + escaped(dtype.name ? dtype.name : given) + "\nwhence.name=" + escaped(name ? name : "") + "\n";
    head += "whence.side=" + escaped(side ? side : "") + "\nwhence.id=" + escaped(id ? id : "") + "\nwhence.task=" + escaped(task) + "\n";
    head += "whence.occurrence=" + std::to_string(occurrence) + "\nwhence.rank=" + rank() + "\nwhence.pid=" + std::to_string(to.pid) + "\n";
    head += "whence.at=" + std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()) + "\n";
    if (!why.empty()) head += "whence.why=" + escaped(why) + "\n";
    if (why.empty()) head += "$Object.data=0," + std::to_string(bytes) + "\n";
    head += "$End=1\n";
    bool done = std::fwrite(head.data(), 1, head.size(), to.file) == head.size();
    if (done && bytes) done = std::fwrite(data, 1, bytes, to.file) == bytes;
    if (!done || std::fflush(to.file) != 0) {
        // What follows a torn label could not be told from its elements: no more from here.
        std::fprintf(stderr, "whence: labels of process %ld end here: they cannot be written to %s\n", to.pid, folder.c_str());
        to.failed = true;
    }
}

template <class Shape>
void begin(const char* name, const void* data, const Shape& shape, const DType& dtype, const std::string& given, const char* side,
           const char* id) noexcept {
    try {
        const std::string folder = variable("WHENCE_LABELS");
        if (folder.empty()) return;
        write(folder, name, data, std::vector<std::int64_t>(shape.begin(), shape.end()), dtype, given, side, id);
    } catch (...) {  // out of memory: the program comes first
    }
}

inline bool on() { return std::getenv("WHENCE_LABELS") != nullptr; }

}  // namespace detail

// Label `data` with a name in the active run. shape: anything with begin() and end(). dtype: a name, or a whence::DType.
template <class Shape>
void label(const char* name, const void* data, const Shape& shape, const char* dtype, const char* side = WHENCE_LABEL_SIDE,
           const char* id = "") noexcept {
    if (!detail::on()) return;
    try {
        const std::string given = dtype ? dtype : "no dtype";
        detail::begin(name, data, shape, detail::dtype_of(given), given, side, id);
    } catch (...) {
    }
}

template <class Shape>
void label(const char* name, const void* data, const Shape& shape, const DType& dtype, const char* side = WHENCE_LABEL_SIDE,
           const char* id = "") noexcept {
    if (!detail::on()) return;
    try {
        detail::begin(name, data, shape, dtype, dtype.name ? dtype.name : "no dtype", side, id);
    } catch (...) {
    }
}

template <class DTypeOrName>
void label(const char* name, const void* data, std::initializer_list<std::int64_t> shape, DTypeOrName dtype,
           const char* side = WHENCE_LABEL_SIDE, const char* id = "") noexcept {
    if (!detail::on()) return;
    try {
        label(name, data, std::vector<std::int64_t>(shape), dtype, side, id);
    } catch (...) {
    }
}

// Begin a task (a dialogue turn, a request) for the labels of this process that follow; null: what the Python around it says.
inline void task(const char* id) noexcept {
    if (!detail::on()) return;
    try {
        detail::Writer& to = detail::writer();
        std::lock_guard<std::mutex> locked(to.lock);
        to.own_task = id != nullptr;
        to.task = id ? id : "";
    } catch (...) {
    }
}

}  // namespace whence

#endif  // WHENCE_LABEL_OFF
#endif  // WHENCE_LABEL_H
