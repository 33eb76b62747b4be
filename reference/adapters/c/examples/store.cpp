// An engine's tensor (layers, 2, tokens, heads, head_dim) goes to a store in a folder; another prompt with the same
// beginning finds it and loads it into the engine's pages.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvc.h"

constexpr size_t LAYERS = 3, HEADS = 2, DIM = 32, ROW = HEADS * DIM, CONTEXT = 520, PAGE = 16;

static void check(int code) {
    if (code == KVC_OK) return;
    std::string text(kvc_last_error(nullptr, 0), '\0');
    kvc_last_error(text.data(), text.size());
    throw std::runtime_error("error " + std::to_string(code) + ": " + text);
}

template <typename T> using handle = std::unique_ptr<T, void (*)(T *)>;

// What the model computes for the token at a position.
static float value(size_t layer, size_t side, size_t token, size_t i) {
    return std::sin(0.7f * static_cast<float>(token * (i % 7 + 1) + 31 * layer + 5 * side)) + static_cast<float>(i % DIM) / 16;
}

static int run(const char *folder) {
    // The engine's cache of a context.
    std::vector<float> tensor(2 * LAYERS * CONTEXT * ROW);
    for (size_t i = 0; i < tensor.size(); i++)
        tensor[i] = value(i / (2 * CONTEXT * ROW), i / (CONTEXT * ROW) % 2, i / ROW % CONTEXT, i % ROW);
    std::vector<kvc_layer> layers;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        const float *keys = &tensor[2 * layer * CONTEXT * ROW];
        layers.push_back({keys, CONTEXT * ROW, keys + CONTEXT * ROW, CONTEXT * ROW});
    }
    std::vector<uint32_t> tokens(CONTEXT);
    std::iota(tokens.begin(), tokens.end(), 100u);
    kvc_place place = {ROW, DIM, 0, nullptr, 0, 0, 0};

    // A profile, once per model: two levels of loss.
    kvc_model model = {0x5eed, LAYERS, HEADS, DIM, 1};
    const float steps[] = {0.05f, 0.5f};
    kvc_profile *fitted;
    check(kvc_profile_fit(&model, steps, 2, CONTEXT, KVC_F32, layers.data(), LAYERS, &place, &fitted));
    handle<kvc_profile> profile(fitted, kvc_profile_free);

    kvc_store *opened;
    check(kvc_store_open(folder, "the model's name and revision", profile.get(), 128, 32, &opened));
    handle<kvc_store> store(opened, kvc_store_free);
    size_t stored, prefix, loaded;
    check(kvc_store_put(store.get(), tokens.data(), CONTEXT, KVC_F32, layers.data(), LAYERS, &place, &stored));

    // Another prompt: 300 tokens of the context, then others. Whole chunks are found.
    std::vector<uint32_t> prompt(tokens.begin(), tokens.begin() + 300);
    prompt.insert(prompt.end(), {1, 2, 3});
    check(kvc_store_find(store.get(), prompt.data(), prompt.size(), &prefix));

    // Pages (page, token, head, component) in any order.
    std::vector<uint32_t> table(CONTEXT / PAGE);
    for (uint32_t i = 0; i < table.size(); i++) table[i] = i * 5 % static_cast<uint32_t>(table.size());
    std::vector<std::vector<float>> pages(2 * LAYERS, std::vector<float>(table.size() * PAGE * ROW));
    std::vector<kvc_layer_mut> to;
    for (size_t layer = 0; layer < LAYERS; layer++)
        to.push_back({pages[2 * layer].data(), pages[0].size(), pages[2 * layer + 1].data(), pages[0].size()});
    kvc_place paged = {ROW, DIM, 0, table.data(), table.size(), PAGE, PAGE * ROW};
    check(kvc_store_get(store.get(), prompt.data(), prompt.size(), 0, KVC_F32, to.data(), LAYERS, &paged, &loaded));

    float worst = 0;
    for (size_t layer = 0; layer < LAYERS; layer++)
        for (size_t side = 0; side < 2; side++)
            for (size_t i = 0; i < loaded * ROW; i++) {
                size_t token = i / ROW, at = (table[token / PAGE] * PAGE + token % PAGE) * ROW + i % ROW;
                worst = std::fmax(worst, std::fabs(pages[2 * layer + side][at] - value(layer, side, token, i % ROW)));
            }
    std::printf("%zu tokens stored, %zu of a prompt of %zu found and loaded, largest error %.3f\n", stored, prefix,
                prompt.size(), worst);
    return stored == 512 && prefix == 256 && loaded == prefix && worst < 0.05f ? 0 : 1;
}

int main(int argc, char **argv) {
    try {
        return run(argc > 1 ? argv[1] : "memory:///");
    } catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
