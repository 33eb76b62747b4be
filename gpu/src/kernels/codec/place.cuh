// Addresses of a plane's elements: rows in an engine's KV cache, or coefficients of the transform in a workspace.
//
// A plane is the keys or the values of a layer, [token][channel] with CHANNELS = heads * HEAD_DIM. Compile-time shape:
// CHANNELS, HEAD_DIM, PAGED (defined if tokens lie in pages), ELEMENT (0 for f32, 1 for f16, 2 for bf16).
#pragma once
#include "element.cuh"

__device__ __forceinline__ float clamp_to(float x, float largest) { return fminf(fmaxf(x, -largest), largest); }

__device__ __forceinline__ float clamp_finite(float x) { return clamp_to(x, 3.40282347e38f); }

// A decoded value as an element. As on the CPU, values beyond the largest finite element become that element.
__device__ __forceinline__ Element decoded_element(float x) {
#if ELEMENT == 0
    return clamp_finite(x);
#elif ELEMENT == 1
    return to_element(clamp_to(x, 65504.0f));
#else
    return to_element(clamp_to(x, 3.38953139e38f));
#endif
}

// Strides of the elements [token][head][component] of a plane.
struct Place {
    u64 token_stride, head_stride, page_stride; // in elements
    const u32* pages;                           // page of every `page_tokens` tokens
    u32 page_tokens, first_token;               // `first_token` is the position of the frame's first token

    __device__ __forceinline__ u64 of_channel(u32 channel) const {
        return channel / HEAD_DIM * head_stride + channel % HEAD_DIM;
    }

    // Offset of a token, which counts from the first token of the frame.
    __device__ __forceinline__ u64 of_token(u32 token) const {
        token += first_token;
#ifdef PAGED
        return pages[token / page_tokens] * page_stride + token % page_tokens * token_stride;
#else
        return token * token_stride;
#endif
    }

    // Whether `of_token(token)` must be recomputed, since it is not `of_token(token - 1)` plus a stride.
    __device__ __forceinline__ bool starts_page(u32 token) const {
#ifdef PAGED
        return (token + first_token) % page_tokens == 0;
#else
        return false;
#endif
    }
};

// The planes of a launch: at a pointer each, or contiguous.
struct PlanesAt {
    Element* const* each; // [plane], or null
    Element* all;         // used if `each` is null
    u64 stride;           // elements from a plane to the next in `all`

    __device__ Element* operator[](u32 plane) const { return each ? each[plane] : all + plane * stride; }
};

// Walks a channel of a plane, token after token: one addition per token, except where a page begins.
struct Column {
    Element* base;
    Element* at;

    // Begins at `token`.
    __device__ Column(const Place& place, Element* plane, u32 channel, u32 token)
        : base(plane + place.of_channel(channel)), at(base + place.of_token(token)) {}

    // The element of `token`. Calls are for consecutive tokens.
    __device__ __forceinline__ Element* of(const Place& place, u32 token) {
        if (place.starts_page(token)) at = base + place.of_token(token);
        Element* element = at;
        at += place.token_stride;
        return element;
    }
};
