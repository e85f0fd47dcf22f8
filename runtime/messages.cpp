#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <fmt/format.h>
#include <msgpack.hpp>

#include <kvferry/runtime/map_reader.hpp>
#include <kvferry/runtime/messages.hpp>

namespace kvferry {
namespace {

// Each message lists its fields once; the writer and the reader below walk the same list.
template <class Visitor>
void visit_fields(Visitor&& visit, HelloMessage& m) {
  visit("proto", m.protocol), visit("name", m.name), visit("inc", m.incarnation), visit("host", m.host_id);
}
template <class Visitor>
void visit_fields(Visitor&& visit, PortAdvert& m) {
  visit("transport", m.transport), visit("address", m.address);
}
template <class Visitor>
void visit_fields(Visitor&& visit, std::pair<std::string, std::string>& m) {
  visit("transport", m.first), visit("data", m.second);
}
template <class Visitor>
void visit_fields(Visitor&& visit, RemoteRegion& m) {
  visit("slot", m.key.slot), visit("gen", m.key.generation), visit("name", m.name), visit("size", m.size);
  visit("kind", m.kind), visit("access", m.access), visit("desc", m.descriptors);
}
template <class Visitor>
void visit_fields(Visitor&& visit, WelcomeMessage& m) {
  visit("proto", m.protocol), visit("name", m.name), visit("inc", m.incarnation), visit("host", m.host_id);
  visit("data_host", m.data_host), visit("token", m.token), visit("ports", m.ports), visit("regions", m.regions);
}
template <class Visitor>
void visit_fields(Visitor&& visit, RefusedMessage& m) {
  visit("proto", m.protocol), visit("code", m.code), visit("text", m.text);
}
template <class Visitor>
void visit_fields(Visitor&& visit, PingMessage& m) {
  visit("inc", m.incarnation);
}
template <class Visitor>
void visit_fields(Visitor&& visit, PongMessage& m) {
  visit("inc", m.incarnation), visit("known", m.known);
}
template <class Visitor>
void visit_fields(Visitor&& visit, FindRegionMessage& m) {
  visit("inc", m.incarnation), visit("name", m.name);
}
template <class Visitor>
void visit_fields(Visitor&& visit, RegionMessage& m) {
  visit("found", m.found), visit("region", m.region);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ByeMessage& m) {
  visit("inc", m.incarnation);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ChannelMessage& m) {
  visit("inc", m.incarnation), visit("transport", m.transport), visit("address", m.address);
  visit("request", m.request);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ChannelAnswerMessage& m) {
  visit("answer", m.answer);
}

struct AnyVisitor {
  template <class T>
  void operator()(std::string_view, T&) const {}
};
template <class T>
concept HasFields = requires(AnyVisitor visit, T& message) {
  visit_fields(visit, message);
};

constexpr std::array<std::string_view, std::variant_size_v<ControlBody>> type_names = {
    "hello", "welcome", "refused", "ping", "pong", "find_region", "region", "bye", "channel", "channel_answer"};

using Packer = msgpack::packer<msgpack::sbuffer>;

class Writer {
 public:
  explicit Writer(Packer& packer) : packer_(packer) {}

  template <class T>
  void operator()(std::string_view key, T& value) {
    put(key);
    put(value);
  }
  void put(std::string_view text) {
    packer_.pack_str(static_cast<std::uint32_t>(text.size())).pack_str_body(text.data(), text.size());
  }
  // Addresses, descriptors and names may hold any bytes, so all of them travel as bin.
  void put(const std::string& bytes) {
    packer_.pack_bin(static_cast<std::uint32_t>(bytes.size())).pack_bin_body(bytes.data(), bytes.size());
  }
  void put(const std::array<std::byte, 16>& token) {
    packer_.pack_bin(16).pack_bin_body(reinterpret_cast<const char*>(token.data()), 16);
  }
  void put(bool value) { packer_.pack(value); }
  void put(std::uint32_t value) { packer_.pack(value); }
  void put(std::uint64_t value) { packer_.pack(value); }
  void put(MemoryKind value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  void put(Access value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  template <class T>
  void put(std::vector<T>& values) {
    packer_.pack_array(static_cast<std::uint32_t>(values.size()));
    for (auto& value : values) put(value);
  }
  template <class T>
  requires HasFields<T>
  void put(T& message) {
    std::uint32_t fields = 0;
    visit_fields([&](std::string_view, auto&) { ++fields; }, message);
    packer_.pack_map(fields);
    visit_fields(*this, message);
  }

 private:
  Packer& packer_;
};

class Reader : public MapReader<Reader> {
 public:
  using MapReader::get;
  using MapReader::MapReader;

  static void get(const msgpack::object& from, std::string& to) { to = bytes_of(from, max_control_string); }
  static void get(const msgpack::object& from, std::array<std::byte, 16>& to) {
    if (from.type != msgpack::type::BIN || from.via.bin.size != to.size()) throw Malformed("expected 16 bytes");
    std::memcpy(to.data(), from.via.bin.ptr, to.size());
  }
  static void get(const msgpack::object& from, MemoryKind& to) { to = static_cast<MemoryKind>(number(from, 1)); }
  static void get(const msgpack::object& from, Access& to) { to = static_cast<Access>(number(from, 3)); }
  template <class T>
  static void get(const msgpack::object& from, std::vector<T>& to) {
    if (from.type != msgpack::type::ARRAY) throw Malformed("expected an array");
    to.clear();
    to.resize(from.via.array.size);
    for (std::size_t i = 0; i < to.size(); ++i) get(from.via.array.ptr[i], to[i]);
  }
  template <class T>
  requires HasFields<T>
  static void get(const msgpack::object& from, T& to) { visit_fields(Reader(from), to); }
};

template <std::size_t Index = 0>
ControlBody read_body(std::string_view type, const msgpack::object& map) {
  if constexpr (Index == type_names.size()) {
    throw Malformed(fmt::format("unknown message type '{}'", type.substr(0, 32)));
  } else {
    if (type != type_names[Index]) return read_body<Index + 1>(type, map);
    std::variant_alternative_t<Index, ControlBody> message;
    visit_fields(Reader(map), message);
    return message;
  }
}

ControlMessage read_message(const msgpack::object& map) {
  const Reader check(map);
  Reader reader(map);
  ControlMessage message;
  reader("id", message.id);
  const msgpack::object* type = find_key(map, "t");
  if (!type || type->type != msgpack::type::STR) throw Malformed("field 't' is missing");
  message.body = read_body({type->via.str.ptr, type->via.str.size}, map);
  return message;
}

std::uint64_t read_version(const msgpack::object& map) {
  if (map.type != msgpack::type::MAP) throw Malformed("expected a map");
  const msgpack::object* version = find_key(map, "v");
  if (!version || version->type != msgpack::type::POSITIVE_INTEGER) throw Malformed("field 'v' is missing");
  return version->via.u64;
}

}  // namespace

void describe_lease(const RangeSet& ranges, RemoteRegion& region) {
  constexpr std::size_t ranges_at_once = max_control_string / 16;
  for (std::size_t first = 0; first < ranges.ranges().size(); first += ranges_at_once)
    region.descriptors.emplace_back(lease_descriptor, ranges.encode(first, ranges_at_once));
}

Status take_lease(RemoteRegion& region) {
  std::vector<ByteRange> ranges;
  for (const auto& [transport, data] : region.descriptors)
    if (transport == lease_descriptor)
      if (Status status = RangeSet::decode(std::as_bytes(std::span(data)), ranges); !status) return status;
  if (std::erase_if(region.descriptors, [](const auto& entry) { return entry.first == lease_descriptor; }) > 0)
    region.lease = std::make_shared<const RangeSet>(std::move(ranges));
  return {};
}

std::string encode(const ControlMessage& message) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  Writer writer(packer);
  std::visit(
      [&](auto body) {
        std::uint32_t fields = 3;
        visit_fields([&](std::string_view, auto&) { ++fields; }, body);
        packer.pack_map(fields);
        std::uint32_t version = schema_version;
        writer("v", version);
        std::string_view type = type_names[message.body.index()];
        writer("t", type);
        std::uint64_t id = message.id;
        writer("id", id);
        visit_fields(writer, body);
      },
      message.body);
  return {buffer.data(), buffer.size()};
}

Result<ControlMessage> decode(std::span<const std::byte> bytes) {
  if (bytes.size() > max_control_bytes)
    return {Errc::malformed,
            fmt::format("a control message of {} bytes is above the limit of {}", bytes.size(), max_control_bytes)};
  try {
    const msgpack::unpack_limit limit(max_control_array, 32, max_control_string, max_control_string, 0, 8);
    std::size_t offset = 0;
    const auto handle =
        msgpack::unpack(reinterpret_cast<const char*>(bytes.data()), bytes.size(), offset, nullptr, nullptr, limit);
    if (offset != bytes.size()) throw Malformed("bytes follow the message");
    const std::uint64_t version = read_version(handle.get());
    if (version != schema_version)
      return {Errc::version_mismatch,
              fmt::format("the control message has schema version {}, this engine reads {}", version, schema_version)};
    return read_message(handle.get());
  } catch (const std::exception& e) {
    return {Errc::malformed, fmt::format("malformed control message of {} bytes: {}", bytes.size(), e.what())};
  }
}

}  // namespace kvferry
