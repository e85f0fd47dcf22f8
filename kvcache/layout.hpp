// How the KV cache of one rank lies in a registered region: five dimensions and a stride for each.
//
// A token's K (or V) vector of one head is `head_size` elements side by side. Everything above it
// is reached by strides: address(layer, part, block, token, head). What a layout cannot describe:
// head vectors that are themselves split, and layers in separate regions (make one layout of one
// layer for each region then).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// Number of a block in its pool, from 0.
using BlockId = std::uint32_t;

/// Element type of the cache. Values are part of the wire form: never renumber.
enum class DType : std::uint8_t { fp32 = 0, bf16 = 1, fp16 = 2, fp8_e4m3 = 3, fp8_e5m2 = 4, int8 = 5 };

/// "bf16", "fp8_e4m3", ...
std::string_view to_string(DType dtype) noexcept;
/// Bytes of one element.
std::uint32_t dtype_bytes(DType dtype) noexcept;

/// What a token leaves in the cache. Values are part of the wire form: never renumber.
enum class Attention : std::uint8_t {
  mha = 0,  ///< K and V for each KV head; grouped- and multi-query attention too
  mla = 1,  ///< multi-head latent attention: one latent vector (with its rotary part), no V
};

/// "mha" or "mla".
std::string_view to_string(Attention attention) noexcept;

/// Index of K and V along the part dimension. MLA's latent is part 0.
enum class Part : std::uint32_t { k = 0, v = 1 };

/// The five dimensions that strides lead through.
enum class Dim : std::uint8_t { layer, part, block, token, head };

/// Dimensions from the outermost (largest stride) to the innermost.
using DimOrder = std::array<Dim, 5>;

/// Bytes from one index of a dimension to the next. The stride of a dimension of size 1 is ignored.
struct Strides {
  std::uint64_t layer = 0;
  std::uint64_t part = 0;
  std::uint64_t block = 0;
  std::uint64_t token = 0;
  std::uint64_t head = 0;

  std::uint64_t of(Dim dim) const noexcept;
  std::uint64_t& of(Dim dim) noexcept;

  friend bool operator==(const Strides&, const Strides&) = default;
};

/// Where the elements lie in their region.
struct Placement {
  std::uint64_t offset = 0;        ///< bytes from the start of the region to address(0, K, 0, 0, 0)
  std::uint64_t region_bytes = 0;  ///< size of the region
  Strides strides;

  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Scales of a quantized cache: one number for each (layer, part, block, token, head), in a region
/// of their own.
struct ScaleSpec {
  DType dtype = DType::fp32;  ///< fp32, bf16 or fp16
  Placement placement;

  friend bool operator==(const ScaleSpec&, const ScaleSpec&) = default;
};

/// The plain numbers of a layout, as one rank of a tensor-parallel group has it.
struct LayoutSpec {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;   ///< of the whole model, over all ranks; 1 for MLA
  std::uint32_t head_size = 0;  ///< elements of one head's K or V; for MLA latent and rotary part together
  DType dtype = DType::bf16;
  Attention attention = Attention::mha;
  std::uint32_t block_tokens = 0;  ///< tokens of one block
  std::uint32_t blocks = 0;        ///< blocks of the pool
  std::uint32_t tp_size = 1;       ///< ranks that share the model's heads
  Placement values;
  std::optional<ScaleSpec> scales;  ///< needed for int8, possible for fp8, refused for others

  friend bool operator==(const LayoutSpec&, const LayoutSpec&) = default;
};

/// Heads [first, first + count) of the model.
struct HeadRange {
  std::uint32_t first = 0;
  std::uint32_t count = 0;

  std::uint32_t end() const noexcept { return first + count; }
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

/// A checked LayoutSpec: every address that it gives lies inside its region, and no two overlap.
/// Immutable, so any number of threads may use one.
///
/// Heads are dealt to ranks as vLLM does it (QKVParallelLinear: num_kv_head_replicas): with at least
/// as many heads as ranks, rank r has kv_heads / tp_size neighbouring heads; with fewer, each head
/// is on tp_size / kv_heads neighbouring ranks.
class Layout {
 public:
  /// Errors: invalid_argument (a size of 0, sizes that do not divide, overlapping strides, scales
  /// that do not fit the dtype), too_large (an address beyond 64 bits), out_of_bounds (the region
  /// is smaller than the layout reaches). The text names the field.
  static Result<Layout> make(const LayoutSpec& spec);

  const LayoutSpec& spec() const noexcept { return spec_; }

  std::uint32_t parts() const noexcept { return spec_.attention == Attention::mla ? 1 : 2; }
  /// Heads in one rank's region.
  std::uint32_t local_heads() const noexcept { return local_heads_; }
  /// Neighbouring ranks that hold the same heads; 1 unless there are more ranks than heads.
  std::uint32_t head_replicas() const noexcept { return head_replicas_; }
  /// Which of the model's heads `rank` holds; rank is below tp_size.
  HeadRange heads_of(std::uint32_t rank) const noexcept { return {rank / head_replicas_ * local_heads_, local_heads_}; }
  /// Indices of a dimension in this rank's region.
  std::uint32_t size(Dim dim) const noexcept;

  /// Bytes of one head's K or V of one token.
  std::uint64_t head_bytes() const noexcept { return std::uint64_t{spec_.head_size} * dtype_bytes(spec_.dtype); }
  /// Bytes of one block over all layers, parts and local heads, without scales.
  std::uint64_t block_bytes() const noexcept;
  /// KV bytes of one token in this rank's region, without scales.
  std::uint64_t token_bytes() const noexcept { return block_bytes() / spec_.block_tokens; }

  /// Byte offset in the region of a head's vector; head counts from 0 inside this rank. Indices are
  /// not checked.
  std::uint64_t address(std::uint32_t layer, Part part, BlockId block, std::uint32_t token,
                        std::uint32_t head) const noexcept;
  /// The same for its scale, in the region of scales; only with spec().scales.
  std::uint64_t scale_address(std::uint32_t layer, Part part, BlockId block, std::uint32_t token,
                              std::uint32_t head) const noexcept;

  friend bool operator==(const Layout& a, const Layout& b) noexcept { return a.spec_ == b.spec_; }

 private:
  explicit Layout(const LayoutSpec& spec);

  LayoutSpec spec_;
  std::uint32_t local_heads_ = 0;
  std::uint32_t head_replicas_ = 1;
};

/// Whether blocks of one can be copied into blocks of the other. Layers, KV heads, head size, dtype,
/// attention and scales must be equal; block size, strides, tensor-parallel size and pool size may
/// differ. Error: unsupported; the text names each field that differs with both values.
Status check_exchange(const Layout& source, const Layout& destination);

// ---------------------------------------------------------------- presets

/// Orders of pages as serving engines have them. The comment of each says where it comes from.
namespace page_order {

using enum Dim;

/// One tensor (2, blocks, block_size, heads, head_size) for each layer: vLLM's FlashAttention backend
/// (FlashAttentionBackend::get_kv_cache_shape), layout NHD. With MLA: MLACommonBackend's
/// (blocks, block_size, size).
inline constexpr DimOrder vllm_nhd{layer, part, block, token, head};
/// The same backend with VLLM_KV_CACHE_LAYOUT=HND: get_kv_cache_stride_order gives (0, 1, 3, 2, 4).
inline constexpr DimOrder vllm_hnd{layer, part, block, head, token};
/// (blocks, 2, block_size, heads, head_size) for each layer: vLLM's FlashInfer backend, and FlashInfer's
/// own paged cache "NHD".
inline constexpr DimOrder flashinfer_nhd{layer, block, part, token, head};
/// FlashInfer's "HND": (blocks, 2, heads, block_size, head_size).
inline constexpr DimOrder flashinfer_hnd{layer, block, part, head, token};
/// One tensor for all layers, (blocks, layers, 2, block_size, heads, head_size): vLLM's cross-layer
/// cache for KV connectors (get_kv_cache_stride_order with include_num_layers_dimension), NHD.
inline constexpr DimOrder vllm_block_first_nhd{block, layer, part, token, head};
/// The same with HND: (blocks, heads, layers, 2, block_size, head_size).
inline constexpr DimOrder vllm_block_first_hnd{block, head, layer, part, token};
/// (2, layers, tokens, heads, head_size): SGLang's MHATokenToKVPool, whose K and V are lists of one
/// (tokens, heads, head_size) buffer for each layer, and its host pool "layer_first"
/// (memory_pool_host.py, MHATokenToKVPoolHost::init_kv_buffer). For MLA (layers, tokens, 1, size).
inline constexpr DimOrder sglang_layer_first{part, layer, block, token, head};
/// SGLang's host pool "page_first": (2, tokens, layers, heads, head_size).
inline constexpr DimOrder sglang_page_first{part, block, token, layer, head};
/// SGLang's host pool "page_first_direct": (2, pages, layers, page_size, heads, head_size).
inline constexpr DimOrder sglang_page_first_direct{part, block, layer, token, head};
/// SGLang's host pool "page_head": (2, pages, heads, page_size, layers, head_size).
inline constexpr DimOrder sglang_page_head{part, block, head, token, layer};

}  // namespace page_order

/// What of a model decides the size of its KV cache.
struct ModelShape {
  std::string_view name;
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_size = 0;
  Attention attention = Attention::mha;
};

/// Shapes from the config.json that each model is published with: num_hidden_layers,
/// num_key_value_heads, head_dim (hidden_size / num_attention_heads where it is not given); for MLA
/// kv_lora_rank + qk_rope_head_dim.
inline constexpr std::array known_model_shapes = {
    ModelShape{"llama-3.1-8b", 32, 8, 128},                     // meta-llama/Llama-3.1-8B: 4096 / 32 heads
    ModelShape{"llama-3.1-70b", 80, 8, 128},                    // meta-llama/Llama-3.1-70B: 8192 / 64 heads
    ModelShape{"qwen3-32b", 64, 8, 128},                        // Qwen/Qwen3-32B
    ModelShape{"deepseek-v3", 61, 1, 512 + 64, Attention::mla}  // deepseek-ai/DeepSeek-V3
};

/// The shape of that name. Error: invalid_argument; the text lists the known names.
Result<ModelShape> find_model_shape(std::string_view name);

/// What is chosen for a model when it is served.
struct PageOptions {
  std::uint32_t block_tokens = 16;
  std::uint32_t blocks = 0;
  DType dtype = DType::bf16;
  std::uint32_t tp_size = 1;
  DType scale_dtype = DType::fp32;  ///< for int8
};

/// A layout without gaps in that order of dimensions, from offset 0 of a region that it fills
/// exactly; for int8 the scales lie in the same order in theirs. Errors as Layout::make.
Result<Layout> packed_layout(const ModelShape& model, const PageOptions& options, const DimOrder& order);

/// Fills in values (and the scales' placement, when spec.scales is set) so that nothing lies between
/// elements: strides in that order, offset 0, region_bytes the exact need.
/// Errors: invalid_argument (an order that names a dimension twice), too_large.
Status place_densely(LayoutSpec& spec, const DimOrder& order);

// ---------------------------------------------------------------- wire form

inline constexpr std::uint32_t layout_schema_version = 1;
inline constexpr std::size_t max_layout_bytes = 4096;

/// A MessagePack map with the schema version in "v", for the handshake. At most max_layout_bytes.
std::string encode_layout(const Layout& layout);

/// Reads what encode_layout wrote; unknown keys are ignored. Errors: malformed (the text names the
/// field), version_mismatch (another schema version), and those of Layout::make: a layout from a
/// peer is checked like one's own.
Result<Layout> decode_layout(std::span<const std::byte> bytes);

}  // namespace kvferry
