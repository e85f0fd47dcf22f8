#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvferry/kvcache/layout.hpp>

namespace kvferry {
namespace {

constexpr std::array all_dims{Dim::layer, Dim::part, Dim::block, Dim::token, Dim::head};

std::string_view name_of(Dim dim) noexcept {
  constexpr std::array<std::string_view, 5> names{"layer", "part", "block", "token", "head"};
  return names[static_cast<std::size_t>(dim)];
}

std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

std::optional<std::uint64_t> sum(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

std::uint32_t local_heads_of(const LayoutSpec& spec) noexcept { return std::max(1u, spec.kv_heads / spec.tp_size); }

std::uint32_t size_of(const LayoutSpec& spec, Dim dim) noexcept {
  switch (dim) {
    case Dim::layer:
      return spec.layers;
    case Dim::part:
      return spec.attention == Attention::mla ? 1 : 2;
    case Dim::block:
      return spec.blocks;
    case Dim::token:
      return spec.block_tokens;
    case Dim::head:
      return local_heads_of(spec);
  }
  return 0;
}

Status invalid(std::string text) { return {Errc::invalid_argument, "KV layout: " + std::move(text)}; }

Status beyond_64_bits(std::string_view what) {
  return {Errc::too_large, fmt::format("KV layout: {}: an address beyond 64 bits", what)};
}

Status check_sizes(const LayoutSpec& spec) {
  const std::pair<std::string_view, std::uint32_t> sizes[] = {
      {"layers", spec.layers},       {"kv_heads", spec.kv_heads},
      {"head_size", spec.head_size}, {"block_tokens", spec.block_tokens},
      {"blocks", spec.blocks},       {"tp_size", spec.tp_size}};
  for (const auto& [field, size] : sizes)
    if (size == 0) return invalid(fmt::format("{} is 0, expected at least 1", field));
  if (spec.dtype > DType::int8) return invalid(fmt::format("dtype {} does not exist", static_cast<int>(spec.dtype)));
  if (spec.attention > Attention::mla)
    return invalid(fmt::format("attention {} does not exist", static_cast<int>(spec.attention)));
  return {};
}

Status check_heads(const LayoutSpec& spec) {
  if (spec.attention == Attention::mla && spec.kv_heads != 1)
    return invalid(fmt::format("kv_heads is {}, but MLA has one latent: set 1", spec.kv_heads));
  if (spec.kv_heads % spec.tp_size != 0 && spec.tp_size % spec.kv_heads != 0)
    return invalid(
        fmt::format("kv_heads {} and tp_size {}: neither divides the other, so heads and ranks can not be "
                    "dealt out evenly",
                    spec.kv_heads, spec.tp_size));
  return {};
}

Status check_scales(const LayoutSpec& spec) {
  if (!spec.scales) {
    if (spec.dtype == DType::int8) return invalid("dtype int8 needs scales, and there are none");
    return {};
  }
  if (dtype_bytes(spec.dtype) != 1)
    return invalid(fmt::format("dtype {} has no scales, but scales are given", to_string(spec.dtype)));
  if (spec.scales->dtype > DType::fp16)
    return invalid(fmt::format("scales.dtype is {}: not one of fp32, bf16, fp16", to_string(spec.scales->dtype)));
  return {};
}

/// Dimensions with more than one index, from the smallest stride to the largest.
std::vector<Dim> by_stride(const LayoutSpec& spec, const Strides& strides) {
  std::vector<Dim> dims;
  for (const Dim dim : all_dims)
    if (size_of(spec, dim) > 1) dims.push_back(dim);
  std::ranges::sort(dims, {}, [&](Dim dim) { return strides.of(dim); });
  return dims;
}

/// Each stride must step over all that the smaller strides reach. Strides that are free of overlap
/// in another, interleaved way exist, but no engine has them.
Status check_placement(const LayoutSpec& spec, const Placement& placement, std::uint64_t element_bytes,
                       std::string_view what) {
  std::uint64_t reach = element_bytes;
  std::string_view inner = "one head's elements";
  for (const Dim dim : by_stride(spec, placement.strides)) {
    const std::uint64_t stride = placement.strides.of(dim);
    if (stride < reach)
      return invalid(fmt::format("{}: the {} stride of {} bytes overlaps {}, which reach {} bytes", what, name_of(dim),
                                 stride, inner, reach));
    const auto steps = product(stride, size_of(spec, dim) - 1);
    const auto wider = steps ? sum(reach, *steps) : std::nullopt;
    if (!wider) return beyond_64_bits(what);
    reach = *wider;
    inner = "the dimensions inside it";
  }
  const auto end = sum(placement.offset, reach);
  if (!end) return beyond_64_bits(what);
  if (*end > placement.region_bytes)
    return {Errc::out_of_bounds,
            fmt::format("KV layout: {}: the layout reaches byte {} (offset {} and {} bytes), but region_bytes is {}",
                        what, *end, placement.offset, reach, placement.region_bytes)};
  return {};
}

std::uint64_t locate(const Placement& placement, std::uint64_t layer, Part part, std::uint64_t block,
                     std::uint64_t token, std::uint64_t head) noexcept {
  const Strides& strides = placement.strides;
  return placement.offset + layer * strides.layer + static_cast<std::uint64_t>(part) * strides.part +
         block * strides.block + token * strides.token + head * strides.head;
}

std::uint64_t scale_bytes(const LayoutSpec& spec) noexcept { return dtype_bytes(spec.scales->dtype); }

std::uint64_t value_bytes(const LayoutSpec& spec) noexcept {
  return std::uint64_t{spec.head_size} * dtype_bytes(spec.dtype);
}

Status pack_placement(const LayoutSpec& spec, const DimOrder& order, std::uint64_t element_bytes,
                      Placement& placement) {
  placement.offset = 0;
  std::uint64_t reach = element_bytes;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    placement.strides.of(*dim) = reach;
    const auto wider = product(reach, size_of(spec, *dim));
    if (!wider) return beyond_64_bits("strides");
    reach = *wider;
  }
  placement.region_bytes = reach;
  return {};
}

}  // namespace

std::string_view to_string(DType dtype) noexcept {
  constexpr std::array<std::string_view, 6> names{"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"};
  const auto index = static_cast<std::size_t>(dtype);
  return index < names.size() ? names[index] : "unknown";
}

std::uint32_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp32:
      return 4;
    case DType::bf16:
    case DType::fp16:
      return 2;
    case DType::fp8_e4m3:
    case DType::fp8_e5m2:
    case DType::int8:
      return 1;
  }
  return 1;
}

std::string_view to_string(Attention attention) noexcept { return attention == Attention::mla ? "mla" : "mha"; }

std::uint64_t& Strides::of(Dim dim) noexcept {
  std::uint64_t* const strides[] = {&layer, &part, &block, &token, &head};
  return *strides[static_cast<std::size_t>(dim)];
}

std::uint64_t Strides::of(Dim dim) const noexcept { return const_cast<Strides*>(this)->of(dim); }

// ---------------------------------------------------------------- Layout

Result<Layout> Layout::make(const LayoutSpec& spec) {
  if (Status status = check_sizes(spec); !status) return status;
  if (Status status = check_heads(spec); !status) return status;
  if (Status status = check_scales(spec); !status) return status;
  if (Status status = check_placement(spec, spec.values, value_bytes(spec), "values"); !status) return status;
  if (spec.scales) {
    if (Status status = check_placement(spec, spec.scales->placement, scale_bytes(spec), "scales"); !status)
      return status;
  }
  return Layout(spec);
}

Layout::Layout(const LayoutSpec& spec)
    : spec_(spec), local_heads_(local_heads_of(spec)), head_replicas_(std::max(1u, spec.tp_size / spec.kv_heads)) {}

std::uint32_t Layout::size(Dim dim) const noexcept { return size_of(spec_, dim); }

std::uint64_t Layout::block_bytes() const noexcept {
  return head_bytes() * local_heads_ * spec_.block_tokens * parts() * spec_.layers;
}

std::uint64_t Layout::address(std::uint32_t layer, Part part, BlockId block, std::uint32_t token,
                              std::uint32_t head) const noexcept {
  return locate(spec_.values, layer, part, block, token, head);
}

std::uint64_t Layout::scale_address(std::uint32_t layer, Part part, BlockId block, std::uint32_t token,
                                    std::uint32_t head) const noexcept {
  assert(spec_.scales);
  return locate(spec_.scales->placement, layer, part, block, token, head);
}

// ---------------------------------------------------------------- exchange

Status check_exchange(const Layout& source, const Layout& destination) {
  std::string differences;
  const auto compare = [&](std::string_view field, const auto& ours, const auto& theirs) {
    if (ours == theirs) return;
    differences += fmt::format("{}{} is {} at the source and {} at the destination", differences.empty() ? "" : "; ",
                               field, ours, theirs);
  };
  const auto scales = [](const LayoutSpec& spec) { return spec.scales ? to_string(spec.scales->dtype) : "none"; };
  const LayoutSpec& from = source.spec();
  const LayoutSpec& to = destination.spec();
  compare("attention", to_string(from.attention), to_string(to.attention));
  compare("layers", from.layers, to.layers);
  compare("kv_heads", from.kv_heads, to.kv_heads);
  compare("head_size", from.head_size, to.head_size);
  compare("dtype", to_string(from.dtype), to_string(to.dtype));
  compare("scales", scales(from), scales(to));
  if (differences.empty()) return {};
  return {Errc::unsupported,
          "these KV layouts can not exchange blocks: " + differences + ". Serve the same model with the same KV dtype"};
}

// ---------------------------------------------------------------- presets

Result<ModelShape> find_model_shape(std::string_view name) {
  std::string names;
  for (const ModelShape& model : known_model_shapes) {
    if (model.name == name) return model;
    names += (names.empty() ? "" : ", ") + std::string(model.name);
  }
  return {Errc::invalid_argument, fmt::format("no model shape is named '{}'; known are {}", name, names)};
}

Status place_densely(LayoutSpec& spec, const DimOrder& order) {
  DimOrder sorted = order;
  std::ranges::sort(sorted);
  if (sorted != all_dims) return invalid("the order of dimensions names one twice or lacks one");
  if (Status status = check_sizes(spec); !status) return status;
  if (Status status = pack_placement(spec, order, value_bytes(spec), spec.values); !status) return status;
  return spec.scales ? pack_placement(spec, order, scale_bytes(spec), spec.scales->placement) : Status();
}

Result<Layout> packed_layout(const ModelShape& model, const PageOptions& options, const DimOrder& order) {
  LayoutSpec spec;
  spec.layers = model.layers;
  spec.kv_heads = model.kv_heads;
  spec.head_size = model.head_size;
  spec.attention = model.attention;
  spec.dtype = options.dtype;
  spec.block_tokens = options.block_tokens;
  spec.blocks = options.blocks;
  spec.tp_size = options.tp_size;
  if (options.dtype == DType::int8) spec.scales = ScaleSpec{.dtype = options.scale_dtype, .placement = {}};
  if (Status status = place_densely(spec, order); !status) return status;
  return Layout::make(spec);
}

}  // namespace kvferry
