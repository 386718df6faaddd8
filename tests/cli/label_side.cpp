// The other side of a comparison: a chain of small layers, labelled through the header, whose last tensor a "library" saves as a file.
//
//     label_side WEIGHTS INPUT WIDTH LAYERS FAULTY_LAYER FILE
#include <whence_label.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

static std::vector<float> read(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<float> out(bytes.size() / 4);
    std::memcpy(out.data(), bytes.data(), out.size() * 4);
    return out;
}

int main(int count, char** words) {
    if (count != 7) return 2;
    const std::vector<float> weights = read(words[1]);
    std::vector<float> x = read(words[2]);
    const std::size_t width = std::stoul(words[3]), layers = std::stoul(words[4]), rows = x.size() / width;
    const long faulty = std::stol(words[5]);
    const std::vector<std::int64_t> shape{static_cast<std::int64_t>(rows), static_cast<std::int64_t>(width)};
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const float* w = weights.data() + layer * width * width;
        std::vector<float> y(x.size());
        for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t o = 0; o < width; ++o) {
                float sum = 0;
                for (std::size_t i = 0; i < width; ++i) sum += x[r * width + i] * w[i * width + o];
                y[r * width + o] = sum;
            }
        if (static_cast<long>(layer) == faulty) y[width + 1] += 0.25f;
        WHENCE_LABEL(("matmul " + std::to_string(layer)).c_str(), y.data(), shape, "float32");
        for (float& v : y) v = std::tanh(v);
        WHENCE_LABEL("tanh", y.data(), shape, "float32", "target");
        x = y;
    }
    WHENCE_LABEL("absent", nullptr, shape, "float32");
    // What an accelerated library does by itself: the tensor as a file, found by nobody but its name.
    std::ofstream out(words[6], std::ios::binary | std::ios::app);
    out << "$Version=1.0\n$Object.Count=1\n$Object.Length=" << x.size() * 4 << "\nformat=2\ndtype=0\ndims=" << rows << "," << width
        << "\n$Object.data=0," << x.size() * 4 << "\n$End=1\n";
    out.write(reinterpret_cast<const char*>(x.data()), static_cast<std::streamsize>(x.size() * 4));
    std::cout << "side done" << std::endl;
    return 0;
}
