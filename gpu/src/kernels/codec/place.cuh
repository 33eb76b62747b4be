// Where the numbers of planes are: in an engine's cache, or coefficients on their way there.
//
// Compile-time shape: CHANNELS, HEAD_DIM, PAGED or not, ELEMENT.
#pragma once
#include "element.cuh"

// Numbers [token][head][component] of a plane, with strides, tokens in pages or not.
struct Place {
    u64 token_stride, head_stride, page_stride; // numbers
    const u32* pages;                           // of every `page_tokens` tokens
    u32 page_tokens, first_token;

    __device__ __forceinline__ u64 of_channel(u32 channel) const {
        return channel / HEAD_DIM * head_stride + channel % HEAD_DIM;
    }

    // `token` counts from the place's first one.
    __device__ __forceinline__ u64 of_token(u32 token) const {
        token += first_token;
#ifdef PAGED
        return pages[token / page_tokens] * page_stride + token % page_tokens * token_stride;
#else
        return token * token_stride;
#endif
    }

    // Whether `of_token` is no longer the token's before and a stride.
    __device__ __forceinline__ bool starts_anew(u32 token) const {
#ifdef PAGED
        return (token + first_token) % page_tokens == 0;
#else
        return false;
#endif
    }
};

// Planes of a launch: each at a pointer of its own, or all behind each other.
struct PlanesAt {
    Element* const* each; // or null
    Element* all;
    u64 stride; // numbers

    __device__ Element* operator[](u32 plane) const { return each ? each[plane] : all + plane * stride; }
};

// A lane's channel of a plane, token after token.
struct Column {
    Element* base;
    Element* at;

    __device__ Column(const Place& place, Element* plane, u32 channel) : base(plane + place.of_channel(channel)) {}

    // The lane's number of token `token`, which is the one behind the last that was asked for.
    __device__ __forceinline__ Element* of(const Place& place, u32 token, bool first) {
        if (first || place.starts_anew(token)) at = base + place.of_token(token);
        Element* number = at;
        at += place.token_stride;
        return number;
    }
};
