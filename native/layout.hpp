// What Python and the kernels both know: the work of a call, and the columns of its result rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace whence {

using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Sums over the finite elements of one side; "pair" sums over places finite on both.
#define WHENCE_FLOATS(X)                                                                          \
    X(r_sum) X(t_sum) X(r_sq) X(t_sq) X(r_m2) X(t_m2) X(r_min) X(r_max) X(t_min) X(t_max) X(rr)   \
    X(tt) X(rt) X(dd) X(d_sum) X(ad_sum) X(ad_max) X(rel_sum) X(rel_max) X(ulp_sum) X(ulp_max)    \
    X(row_worst) X(channel_worst) X(row_dd) X(row_rr) X(r_scale) X(t_scale) X(rr_scale)           \
    X(tt_scale) X(dd_scale)
#define WHENCE_INTS(X)                                                                            \
    X(n) X(r_finite) X(t_finite) X(pairs) X(r_nan) X(t_nan) X(nan_both) X(nan_mismatch) X(r_inf)  \
    X(t_inf) X(inf_match) X(inf_mismatch) X(sign) X(bytes_differ) X(values_differ) X(close)       \
    X(rel_skipped) X(ad_index) X(bad_index) X(row_index) X(channel_index) X(ad_block) X(over_0)   \
    X(over_1) X(over_2) X(over_3) X(over_4) X(over_5) X(over_6) X(over_7)

#define WHENCE_PAIR(X)                                                                            \
    X(r_address) X(t_address) X(n) X(r_code) X(t_code) X(channels) X(d_channels) X(r_channels)    \
    X(path)

#define WHENCE_DOUBLE(name) double name;
#define WHENCE_INT(name) i64 name;
struct Floats {
    WHENCE_FLOATS(WHENCE_DOUBLE)
};
struct Ints {
    WHENCE_INTS(WHENCE_INT)
};

// A pair of tensors, or a chunk of one that begins at a row. n: elements, with `same` bytes.
// channels: length of the last axis, or 0. r_channels: where a chunk leaves its sums of squares by
// channel (d_channels: of the difference), 0 for a whole tensor.
struct Pair {
    WHENCE_PAIR(WHENCE_INT)
};
#undef WHENCE_DOUBLE
#undef WHENCE_INT
enum Path : i64 { narrow = 0, wide = 1, joint = 2, same = 3 };

// A content to describe. code -1: no figures.
struct Content {
    i64 address, nbytes, code;
};
// Its answer; digest: low half, high half.
struct Counts {
    u64 digest[2], finite, nan, inf, zero, checksum;
};
struct Figures {
    double min, max, sum, squares, deviations, absolute, cube, fourth;
};
// What a device says of a unit of bytes.
struct Unit {
    u64 nan, inf, zero, checksum;
    Figures figures;
};

struct Tolerance {
    double relative, absolute;
    const double* thresholds;
};
enum Tier : i64 { core = 1, full = 2 };

constexpr i64 BLOCK = 2048;            // elements of a tensor that stay in the first-level cache
constexpr int BINS = 64;               // of the histogram of errors
constexpr i64 HASH_BLOCK = 1024;       // bytes between two scrambles of XXH3
constexpr i64 UNIT_BYTES = 32 * HASH_BLOCK;
constexpr i64 DIGEST_BYTES = 241;      // XXH3 has other ways for shorter contents

inline i64 itemsize(i64 code) {
    constexpr u8 sizes[] = {4, 2, 2, 1, 1, 1, 1, 8, 8, 8, 2, 2, 4, 4};
    return sizes[code];
}

template <class T>
const T* at(i64 address) {
    return reinterpret_cast<const T*>(static_cast<std::uintptr_t>(address));
}
template <class T>
T* writable(i64 address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

// The kernels, as one instruction set has them. Each returns false where memory ran out.
struct Kernels {
    const char* name;
    bool (*compare)(const Pair*, i64 count, Tier, Tolerance, Floats*, Ints*, i64* histograms);
    void (*describe)(Content, bool figures, Counts*, Figures*);
    void (*describe_many)(const Content*, i64 count, const u64* words, Counts*, Figures*);
    void (*join_units)(const Content*, i64 count, const u64* words, Counts*, Figures*);
};

}  // namespace whence
