
#include <fmt/format.h>
#include <msgpack.hpp>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/runtime/map_reader.hpp>

namespace kvferry {
namespace {

// Each map lists its fields once; the writer and the reader below walk the same list.
template <class Visitor>
void visit_fields(Visitor&& visit, Strides& strides) {
  visit("layer", strides.layer), visit("part", strides.part), visit("block", strides.block);
  visit("token", strides.token), visit("head", strides.head);
}
template <class Visitor>
void visit_fields(Visitor&& visit, Placement& placement) {
  visit("offset", placement.offset), visit("bytes", placement.region_bytes), visit("strides", placement.strides);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ScaleSpec& scales) {
  visit("dtype", scales.dtype), visit("place", scales.placement);
}
template <class Visitor>
void visit_fields(Visitor&& visit, LayoutSpec& spec) {
  visit("layers", spec.layers), visit("heads", spec.kv_heads), visit("head_size", spec.head_size);
  visit("dtype", spec.dtype), visit("attention", spec.attention), visit("block_tokens", spec.block_tokens);
  visit("blocks", spec.blocks), visit("tp", spec.tp_size), visit("values", spec.values), visit("scales", spec.scales);
}

using Packer = msgpack::packer<msgpack::sbuffer>;

class Writer {
 public:
  explicit Writer(Packer& packer) : packer_(packer) {}

  template <class T>
  void operator()(std::string_view key, T& value) {
    packer_.pack(key);
    put(value);
  }
  template <class T>
  void put_fields(T& record, std::uint32_t extra = 0) {
    std::uint32_t fields = extra;
    visit_fields([&](std::string_view, auto&) { ++fields; }, record);
    packer_.pack_map(fields);
    if (extra > 0) packer_.pack("v").pack(layout_schema_version);
    visit_fields(*this, record);
  }

 private:
  void put(std::uint32_t value) { packer_.pack(value); }
  void put(std::uint64_t value) { packer_.pack(value); }
  void put(DType value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  void put(Attention value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  void put(std::optional<ScaleSpec>& scales) {
    if (scales)
      put_fields(*scales);
    else
      packer_.pack_nil();
  }
  template <class T>
  void put(T& record) {
    put_fields(record);
  }

  Packer& packer_;
};

class Reader : public MapReader<Reader> {
 public:
  using MapReader::get;
  using MapReader::MapReader;

  static void get(const msgpack::object& from, DType& to) {
    to = static_cast<DType>(number(from, static_cast<std::uint64_t>(DType::int8)));
  }
  static void get(const msgpack::object& from, Attention& to) {
    to = static_cast<Attention>(number(from, static_cast<std::uint64_t>(Attention::mla)));
  }
  static void get(const msgpack::object& from, std::optional<ScaleSpec>& to) {
    to.reset();
    if (from.type != msgpack::type::NIL) get(from, to.emplace());
  }
  template <class T>
  static void get(const msgpack::object& from, T& to) {
    visit_fields(Reader(from), to);
  }
};

std::uint64_t read_version(const msgpack::object& map) {
  if (map.type != msgpack::type::MAP) throw Malformed("expected a map");
  const msgpack::object* version = find_key(map, "v");
  if (!version || version->type != msgpack::type::POSITIVE_INTEGER) throw Malformed("field 'v' is missing");
  return version->via.u64;
}

}  // namespace

std::string encode_layout(const Layout& layout) {
  LayoutSpec spec = layout.spec();
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  Writer(packer).put_fields(spec, 1);
  return {buffer.data(), buffer.size()};
}

Result<Layout> decode_layout(std::span<const std::byte> bytes) {
  if (bytes.size() > max_layout_bytes)
    return {Errc::malformed,
            fmt::format("a KV layout of {} bytes is above the limit of {}", bytes.size(), max_layout_bytes)};
  LayoutSpec spec;
  try {
    // Array, map, string, binary, extension and depth: nothing that a layout has comes near.
    const msgpack::unpack_limit limit(64, 64, 256, 256, 0, 8);
    std::size_t offset = 0;
    const auto handle =
        msgpack::unpack(reinterpret_cast<const char*>(bytes.data()), bytes.size(), offset, nullptr, nullptr, limit);
    if (offset != bytes.size()) throw Malformed("bytes follow the layout");
    const std::uint64_t version = read_version(handle.get());
    if (version != layout_schema_version)
      return {Errc::version_mismatch,
              fmt::format("the KV layout has schema version {}, this engine reads {}", version, layout_schema_version)};
    visit_fields(Reader(handle.get()), spec);
  } catch (const std::exception& e) {
    return {Errc::malformed, fmt::format("malformed KV layout of {} bytes: {}", bytes.size(), e.what())};
  }
  return Layout::make(spec);
}

}  // namespace kvferry
