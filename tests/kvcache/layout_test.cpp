#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <msgpack.hpp>

#include <kvferry/kvcache/layout.hpp>

namespace kvferry {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

/// 2 layers, 4 heads of 8 bf16 elements, 5 blocks of 4 tokens.
LayoutSpec small_spec() {
  LayoutSpec spec;
  spec.layers = 2;
  spec.kv_heads = 4;
  spec.head_size = 8;
  spec.block_tokens = 4;
  spec.blocks = 5;
  EXPECT_TRUE(place_densely(spec, page_order::vllm_nhd));
  return spec;
}

LayoutSpec int8_spec() {
  LayoutSpec spec = small_spec();
  spec.dtype = DType::int8;
  spec.scales = ScaleSpec{.dtype = DType::fp16, .placement = {}};
  EXPECT_TRUE(place_densely(spec, page_order::vllm_hnd));
  return spec;
}

void expect_error(const Status& status, Errc code, std::string_view part) {
  EXPECT_TRUE(status == code) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould name: " << part;
}

template <class Change>
Status refusal(LayoutSpec spec, Change&& change) {
  change(spec);
  return Layout::make(spec).status();
}

template <class Change>
Status refusal(Change&& change) {
  return refusal(small_spec(), change);
}

TEST(Layout, AddressesFollowTheStrides) {
  const Layout layout = Layout::make(small_spec()).value();
  EXPECT_EQ(layout.head_bytes(), 16u);
  EXPECT_EQ(layout.address(0, Part::k, 0, 0, 1), 16u);
  EXPECT_EQ(layout.address(0, Part::k, 0, 1, 0), 4 * 16u);
  EXPECT_EQ(layout.address(0, Part::k, 1, 0, 0), 4 * 4 * 16u);
  EXPECT_EQ(layout.address(0, Part::v, 0, 0, 0), 5 * 4 * 4 * 16u);
  EXPECT_EQ(layout.address(1, Part::k, 0, 0, 0), 2 * 5 * 4 * 4 * 16u);
  EXPECT_EQ(layout.address(1, Part::v, 4, 3, 3) + 16, layout.spec().values.region_bytes);
  EXPECT_EQ(layout.block_bytes(), 2 * 2 * 4 * 4 * 16u);
  EXPECT_EQ(layout.token_bytes(), 2 * 2 * 4 * 16u);
}

TEST(Layout, AnOffsetMovesEveryAddress) {
  LayoutSpec spec = small_spec();
  spec.values.offset = 4096;
  spec.values.region_bytes += 4096;
  EXPECT_EQ(Layout::make(spec).value().address(0, Part::k, 0, 1, 0), 4096 + 64u);
}

TEST(Layout, ScalesHaveAddressesOfTheirOwn) {
  const Layout layout = Layout::make(int8_spec()).value();
  EXPECT_EQ(layout.head_bytes(), 8u);
  EXPECT_EQ(layout.scale_address(0, Part::k, 0, 1, 0), 2u);
  EXPECT_EQ(layout.scale_address(0, Part::k, 0, 0, 1), 4 * 2u);
  EXPECT_EQ(layout.spec().scales->placement.region_bytes, 2 * 2 * 5 * 4 * 4 * 2u);
}

TEST(Layout, RanksShareHeadsAsEnginesDo) {
  LayoutSpec spec = small_spec();
  const auto heads = [&](std::uint32_t tp_size, std::uint32_t rank) {
    spec.tp_size = tp_size;
    EXPECT_TRUE(place_densely(spec, page_order::vllm_nhd));
    return Layout::make(spec).value().heads_of(rank);
  };
  EXPECT_EQ(heads(1, 0), (HeadRange{0, 4}));
  EXPECT_EQ(heads(2, 1), (HeadRange{2, 2}));
  EXPECT_EQ(heads(4, 3), (HeadRange{3, 1}));
  EXPECT_EQ(heads(8, 0), (HeadRange{0, 1}));
  EXPECT_EQ(heads(8, 1), (HeadRange{0, 1}));
  EXPECT_EQ(heads(8, 7), (HeadRange{3, 1}));
}

// ---------------------------------------------------------------- refusals

TEST(LayoutRefusals, EverySizeOfZeroIsNamed) {
  expect_error(refusal([](auto& s) { s.layers = 0; }), Errc::invalid_argument, "layers is 0");
  expect_error(refusal([](auto& s) { s.kv_heads = 0; }), Errc::invalid_argument, "kv_heads is 0");
  expect_error(refusal([](auto& s) { s.head_size = 0; }), Errc::invalid_argument, "head_size is 0");
  expect_error(refusal([](auto& s) { s.block_tokens = 0; }), Errc::invalid_argument, "block_tokens is 0");
  expect_error(refusal([](auto& s) { s.blocks = 0; }), Errc::invalid_argument, "blocks is 0");
  expect_error(refusal([](auto& s) { s.tp_size = 0; }), Errc::invalid_argument, "tp_size is 0");
}

TEST(LayoutRefusals, EnumsHaveOnlyTheirValues) {
  expect_error(refusal([](auto& s) { s.dtype = static_cast<DType>(6); }), Errc::invalid_argument, "dtype 6");
  expect_error(refusal([](auto& s) { s.attention = static_cast<Attention>(2); }), Errc::invalid_argument,
               "attention 2");
}

TEST(LayoutRefusals, HeadsMustBeDealtEvenly) {
  expect_error(refusal([](auto& s) { s.tp_size = 3; }), Errc::invalid_argument, "kv_heads 4 and tp_size 3");
  expect_error(refusal([](auto& s) { s.tp_size = 6; }), Errc::invalid_argument, "kv_heads 4 and tp_size 6");
  expect_error(refusal([](auto& s) { s.attention = Attention::mla; }), Errc::invalid_argument, "kv_heads is 4");
}

TEST(LayoutRefusals, OverlappingStridesAreNamed) {
  expect_error(refusal([](auto& s) { s.values.strides.head = 15; }), Errc::invalid_argument,
               "the head stride of 15 bytes overlaps one head's elements, which reach 16 bytes");
  expect_error(refusal([](auto& s) { s.values.strides.token = 63; }), Errc::invalid_argument,
               "the token stride of 63 bytes");
  expect_error(refusal([](auto& s) { s.values.strides.block = s.values.strides.token; }), Errc::invalid_argument,
               "stride of 64 bytes overlaps");
  expect_error(refusal([](auto& s) { s.values.strides.layer = 0; }), Errc::invalid_argument,
               "the layer stride of 0 bytes");
}

TEST(LayoutRefusals, TheStrideOfASingleIndexIsOfNoAccount) {
  EXPECT_TRUE(refusal([](auto& s) { s.layers = 1, s.values.strides.layer = 0; }).is_ok());
}

TEST(LayoutRefusals, GapsBetweenElementsAreAllowed) {
  LayoutSpec spec = small_spec();
  spec.values.strides.layer += 100;
  spec.values.region_bytes += 100;
  EXPECT_TRUE(Layout::make(spec));
}

TEST(LayoutRefusals, ARegionThatIsTooSmallIsNamedWithTheNeed) {
  const std::uint64_t need = small_spec().values.region_bytes;
  expect_error(refusal([](auto& s) { s.values.region_bytes -= 1; }), Errc::out_of_bounds,
               "reaches byte " + std::to_string(need));
  expect_error(refusal([](auto& s) { s.values.offset = 1; }), Errc::out_of_bounds, "offset 1");
}

TEST(LayoutRefusals, AddressesBeyond64BitsAreRefused) {
  expect_error(refusal([](auto& s) { s.values.strides.block = std::uint64_t{1} << 63; }), Errc::too_large, "64 bits");
  expect_error(refusal([](auto& s) { s.values.offset = ~std::uint64_t{0}; }), Errc::too_large, "64 bits");
  LayoutSpec spec = small_spec();
  spec.layers = spec.block_tokens = spec.blocks = UINT32_MAX;
  expect_error(place_densely(spec, page_order::vllm_nhd), Errc::too_large, "64 bits");
}

TEST(LayoutRefusals, ScalesAndDtypeMustFit) {
  expect_error(refusal(int8_spec(), [](auto& s) { s.scales.reset(); }), Errc::invalid_argument, "needs scales");
  expect_error(refusal([](auto& s) { s.scales = ScaleSpec{}; }), Errc::invalid_argument, "dtype bf16 has no scales");
  expect_error(refusal(int8_spec(), [](auto& s) { s.scales->dtype = DType::int8; }), Errc::invalid_argument,
               "scales.dtype is int8");
  expect_error(refusal(int8_spec(), [](auto& s) { s.scales->placement.region_bytes = 10; }), Errc::out_of_bounds,
               "scales: the layout reaches");
  EXPECT_TRUE(refusal(int8_spec(), [](auto& s) { s.dtype = DType::fp8_e4m3; }).is_ok());
  EXPECT_TRUE(refusal(int8_spec(), [](auto& s) { s.dtype = DType::fp8_e5m2, s.scales.reset(); }).is_ok());
}

TEST(LayoutRefusals, AnOrderNamesEachDimensionOnce) {
  LayoutSpec spec = small_spec();
  expect_error(place_densely(spec, {Dim::layer, Dim::part, Dim::block, Dim::token, Dim::token}), Errc::invalid_argument,
               "order of dimensions");
}

// ---------------------------------------------------------------- presets

TEST(Presets, StridesAreThoseOfTheEnginesTensors) {
  // Row-major strides of vLLM's FlashAttention tensor (2, 10, 16, 8, 128) in bf16, for each layer.
  const auto nhd = packed_layout(find_model_shape("llama-3.1-8b").value(), {.blocks = 10}, page_order::vllm_nhd);
  ASSERT_TRUE(nhd) << nhd.status().to_string();
  EXPECT_EQ(nhd->spec().values.strides, (Strides{655360, 327680, 32768, 2048, 256}));
  const auto hnd = packed_layout(find_model_shape("llama-3.1-8b").value(), {.blocks = 10}, page_order::vllm_hnd);
  EXPECT_EQ(hnd->spec().values.strides, (Strides{655360, 327680, 32768, 256, 4096}));
  const auto infer =
      packed_layout(find_model_shape("llama-3.1-8b").value(), {.blocks = 10}, page_order::flashinfer_nhd);
  EXPECT_EQ(infer->spec().values.strides, (Strides{655360, 32768, 65536, 2048, 256}));
  const auto across =
      packed_layout(find_model_shape("llama-3.1-8b").value(), {.blocks = 10}, page_order::vllm_block_first_nhd);
  EXPECT_EQ(across->spec().values.strides, (Strides{65536, 32768, 2097152, 2048, 256}));
  // SGLang's host pool (2, 160 tokens, 32 layers, 8 heads, 128).
  const auto page_first =
      packed_layout(find_model_shape("llama-3.1-8b").value(), {.blocks = 10}, page_order::sglang_page_first);
  EXPECT_EQ(page_first->spec().values.strides, (Strides{2048, 10485760, 1048576, 65536, 256}));
}

TEST(Presets, EveryOrderGivesALayoutOfEveryModel) {
  const DimOrder orders[] = {page_order::vllm_nhd,
                             page_order::vllm_hnd,
                             page_order::flashinfer_nhd,
                             page_order::flashinfer_hnd,
                             page_order::vllm_block_first_nhd,
                             page_order::vllm_block_first_hnd,
                             page_order::sglang_layer_first,
                             page_order::sglang_page_first,
                             page_order::sglang_page_first_direct,
                             page_order::sglang_page_head};
  for (const ModelShape& model : known_model_shapes)
    for (const DimOrder& order : orders)
      for (const std::uint32_t tp_size : {1u, 2u, 8u, 16u})
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp8_e4m3, DType::int8}) {
          const auto layout = packed_layout(model, {.blocks = 7, .dtype = dtype, .tp_size = tp_size}, order);
          ASSERT_TRUE(layout) << model.name << ": " << layout.status().to_string();
          EXPECT_EQ(layout->spec().values.region_bytes, layout->block_bytes() * 7) << "no gaps";
        }
}

TEST(Presets, BytesPerTokenAreTheKnownOnes) {
  const auto kib = [](std::string_view model, std::uint32_t tp_size) {
    const auto layout =
        packed_layout(find_model_shape(model).value(), {.blocks = 1, .tp_size = tp_size}, page_order::vllm_nhd);
    return static_cast<double>(layout.value().token_bytes()) / 1024;
  };
  EXPECT_EQ(kib("llama-3.1-8b", 1), 128);
  EXPECT_EQ(kib("llama-3.1-70b", 1), 320);
  EXPECT_EQ(kib("llama-3.1-70b", 8), 40);
  EXPECT_EQ(kib("qwen3-32b", 1), 256);
  EXPECT_NEAR(kib("deepseek-v3", 1), 68.6, 0.05);
  EXPECT_NEAR(kib("deepseek-v3", 8), 68.6, 0.05) << "every rank has the whole latent";
}

TEST(Presets, AnUnknownModelIsNamedBesideTheKnown) {
  expect_error(find_model_shape("llama-9").status(), Errc::invalid_argument, "'llama-9'");
  expect_error(find_model_shape("llama-9").status(), Errc::invalid_argument, "deepseek-v3");
}

// ---------------------------------------------------------------- exchange

TEST(Exchange, PlacementMayDiffer) {
  const Layout source = Layout::make(small_spec()).value();
  LayoutSpec other = small_spec();
  other.block_tokens = 16;
  other.blocks = 3;
  other.tp_size = 8;
  ASSERT_TRUE(place_densely(other, page_order::vllm_block_first_hnd));
  EXPECT_TRUE(check_exchange(source, Layout::make(other).value()).is_ok());
}

TEST(Exchange, EveryFieldThatDiffersIsNamedWithBothValues) {
  const Layout source = Layout::make(small_spec()).value();
  const auto refused = [&](auto&& change) {
    LayoutSpec spec = small_spec();
    change(spec);
    EXPECT_TRUE(place_densely(spec, page_order::vllm_nhd));
    return check_exchange(source, Layout::make(spec).value());
  };
  expect_error(refused([](auto& s) { s.layers = 3; }), Errc::unsupported,
               "layers is 2 at the source and 3 at the destination");
  expect_error(refused([](auto& s) { s.kv_heads = 8; }), Errc::unsupported, "kv_heads is 4 at the source and 8");
  expect_error(refused([](auto& s) { s.head_size = 9; }), Errc::unsupported, "head_size is 8 at the source and 9");
  expect_error(refused([](auto& s) { s.dtype = DType::fp16; }), Errc::unsupported,
               "dtype is bf16 at the source and fp16");
  expect_error(refused([](auto& s) { s.attention = Attention::mla, s.kv_heads = 1; }), Errc::unsupported,
               "attention is mha at the source and mla at the destination; kv_heads is 4 at the source and 1");
}

TEST(Exchange, ScalesMustBeOnBothSides) {
  LayoutSpec with = int8_spec();
  with.dtype = DType::fp8_e4m3;
  LayoutSpec without = with;
  without.scales.reset();
  expect_error(check_exchange(Layout::make(with).value(), Layout::make(without).value()), Errc::unsupported,
               "scales is fp16 at the source and none at the destination");
}

// ---------------------------------------------------------------- wire form

TEST(LayoutWire, EveryLayoutSurvivesTheTrip) {
  LayoutSpec large = small_spec();
  large.values.offset = std::uint64_t{1} << 40;
  large.values.region_bytes = ~std::uint64_t{0};
  for (const LayoutSpec& spec : {small_spec(), int8_spec(), large}) {
    const Layout layout = Layout::make(spec).value();
    const std::string bytes = encode_layout(layout);
    EXPECT_LE(bytes.size(), max_layout_bytes);
    const auto decoded = decode_layout(bytes_of(bytes));
    ASSERT_TRUE(decoded) << decoded.status().to_string();
    EXPECT_EQ(*decoded, layout);
  }
}

TEST(LayoutWire, EveryTruncationIsRefused) {
  const std::string whole = encode_layout(Layout::make(int8_spec()).value());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    // A copy of just these bytes, so that a sanitizer sees a read beyond them.
    const std::vector<char> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    expect_error(decode_layout(std::as_bytes(std::span(part))).status(), Errc::malformed,
                 std::to_string(length) + " bytes");
  }
  expect_error(decode_layout(bytes_of(whole + '\0')).status(), Errc::malformed, "bytes follow the layout");
  expect_error(decode_layout(bytes_of(std::string(max_layout_bytes + 1, '\0'))).status(), Errc::malformed,
               "above the limit of 4096");
}

TEST(LayoutWire, EveryByteMayBeWrong) {
  const std::string whole = encode_layout(Layout::make(int8_spec()).value());
  for (std::size_t place = 0; place < whole.size(); ++place)
    for (int value = 0; value < 256; ++value) {
      std::string changed = whole;
      changed[place] = static_cast<char>(value);
      const auto decoded = decode_layout(bytes_of(changed));
      EXPECT_TRUE(!decoded || Layout::make(decoded->spec())) << "a layout that is let in is a checked one";
    }
}

/// The wire form with one value of the top map replaced, or with a key left out.
std::string edited(const std::string& bytes, const std::string& key, std::optional<std::uint64_t> value) {
  const auto handle = msgpack::unpack(bytes.data(), bytes.size());
  const auto& map = handle.get().via.map;
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  packer.pack_map(value ? map.size : map.size - 1);
  for (std::uint32_t i = 0; i < map.size; ++i) {
    const bool chosen = map.ptr[i].key.as<std::string>() == key;
    if (chosen && !value) continue;
    packer.pack(map.ptr[i].key);
    if (chosen)
      packer.pack(*value);
    else
      packer.pack(map.ptr[i].val);
  }
  return {buffer.data(), buffer.size()};
}

TEST(LayoutWire, ErrorsNameTheField) {
  const std::string whole = encode_layout(Layout::make(small_spec()).value());
  const auto outcome = [&](const std::string& key, std::optional<std::uint64_t> value) {
    return decode_layout(bytes_of(edited(whole, key, value))).status();
  };
  for (const char* key :
       {"layers", "heads", "head_size", "dtype", "attention", "block_tokens", "blocks", "tp", "values", "scales"})
    expect_error(outcome(key, std::nullopt), Errc::malformed, "field '" + std::string(key) + "' is missing");
  expect_error(outcome("v", std::nullopt), Errc::malformed, "field 'v' is missing");
  expect_error(outcome("v", 2), Errc::version_mismatch, "schema version 2, this engine reads 1");
  expect_error(outcome("dtype", 6), Errc::malformed, "field 'dtype': 6 is above 5");
  expect_error(outcome("attention", 2), Errc::malformed, "field 'attention': 2 is above 1");
  expect_error(outcome("layers", std::uint64_t{1} << 32), Errc::malformed, "field 'layers': 4294967296 is above");
  expect_error(outcome("values", 3), Errc::malformed, "field 'values': expected a map");
  expect_error(outcome("scales", 3), Errc::malformed, "field 'scales': expected a map");
}

TEST(LayoutWire, ALayoutFromAPeerIsCheckedLikeOnesOwn) {
  const std::string whole = encode_layout(Layout::make(small_spec()).value());
  expect_error(decode_layout(bytes_of(edited(whole, "layers", 0))).status(), Errc::invalid_argument, "layers is 0");
  expect_error(decode_layout(bytes_of(edited(whole, "blocks", 6))).status(), Errc::invalid_argument, "overlaps");
  expect_error(decode_layout(bytes_of(edited(whole, "layers", 3))).status(), Errc::out_of_bounds, "region_bytes");
}

}  // namespace
}  // namespace kvferry
