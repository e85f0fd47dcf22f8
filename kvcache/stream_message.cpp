#include <algorithm>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <msgpack.hpp>

#include <kvferry/kvcache/stream_message.hpp>
#include <kvferry/runtime/map_reader.hpp>

namespace kvferry {
namespace {

// Each message lists its fields once; the writer and the reader below walk the same list.
template <class Visitor>
void visit_fields(Visitor&& visit, StreamTicket& m) {
  visit("form", m.form), visit("stream", m.stream), visit("inc", m.incarnation), visit("lease", m.lease);
  visit("layout", m.layout), visit("rank", m.rank), visit("blocks", m.blocks);
  visit("first", m.tokens.first), visit("end", m.tokens.end), visit("payload", m.payload);
  visit("sums", m.checksums);
}
template <class Visitor>
void visit_fields(Visitor&& visit, OpenStream& m) {
  visit("head", m.heads.first), visit("heads", m.heads.count), visit("unit", m.unit_tokens);
}
template <class Visitor>
void visit_fields(Visitor&& visit, LayerReady& m) {
  visit("layer", m.layer), visit("sums", m.checksums);
}
template <class Visitor>
void visit_fields(Visitor&& visit, LayerAgain& m) {
  visit("layer", m.layer);
}
template <class Visitor>
void visit_fields(Visitor&&, StreamDone&) {}
template <class Visitor>
void visit_fields(Visitor&& visit, StreamFailed& m) {
  visit("code", m.code), visit("text", m.text);
}

constexpr std::array<std::string_view, std::variant_size_v<StreamBody>> type_names = {"open", "layer", "again", "done",
                                                                                      "failed"};

using Packer = msgpack::packer<msgpack::sbuffer>;

class Writer {
 public:
  explicit Writer(Packer& packer) : packer_(packer) {}

  template <class T>
  void operator()(std::string_view key, T& value) {
    packer_.pack(key);
    put(value);
  }

 private:
  void put(std::uint32_t value) { packer_.pack(value); }
  void put(std::uint64_t value) { packer_.pack(value); }
  void put(bool value) { packer_.pack(value); }
  void put(StreamForm value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  void put(Payload value) { packer_.pack(static_cast<std::uint8_t>(value)); }
  void put_bytes(const void* data, std::size_t bytes) {
    packer_.pack_bin(static_cast<std::uint32_t>(bytes));
    packer_.pack_bin_body(static_cast<const char*>(data), static_cast<std::uint32_t>(bytes));
  }
  void put(const std::string& bytes) { put_bytes(bytes.data(), bytes.size()); }
  template <class Number>
  void put(const std::vector<Number>& numbers) {
    std::string bytes;
    for (const Number number : numbers)
      for (std::size_t i = 0; i < sizeof number; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
    put_bytes(bytes.data(), bytes.size());
  }

  Packer& packer_;
};

class Reader : public MapReader<Reader> {
 public:
  using MapReader::get;
  using MapReader::MapReader;

  static void get(const msgpack::object& from, StreamForm& to) { to = static_cast<StreamForm>(number(from, 1)); }
  static void get(const msgpack::object& from, Payload& to) { to = static_cast<Payload>(number(from, 1)); }
  static void get(const msgpack::object& from, std::string& to) {
    to = bytes_of(from, std::max(max_layout_bytes, max_stream_text));
  }
  template <class Number>
  static void get(const msgpack::object& from, std::vector<Number>& to) {
    constexpr std::size_t most = sizeof(Number) == 8 ? max_layer_checksums : max_ticket_blocks;
    const std::string_view bytes = bytes_of(from, most * sizeof(Number));
    if (bytes.size() % sizeof(Number) != 0) throw Malformed("no whole number of entries");
    to.assign(bytes.size() / sizeof(Number), 0);
    for (std::size_t at = 0; at < bytes.size(); ++at)
      to[at / sizeof(Number)] |= static_cast<Number>(static_cast<unsigned char>(bytes[at]))
                                 << (8 * (at % sizeof(Number)));
  }
};

template <std::size_t Index = 0>
StreamBody read_body(std::string_view type, const msgpack::object& map) {
  if constexpr (Index == type_names.size()) {
    throw Malformed(fmt::format("unknown message type '{}'", type.substr(0, 32)));
  } else {
    if (type != type_names[Index]) return read_body<Index + 1>(type, map);
    std::variant_alternative_t<Index, StreamBody> body;
    visit_fields(Reader(map), body);
    return body;
  }
}

/// A map with the schema version in "v" and what `more` puts in.
template <class More>
std::string write_map(std::uint32_t fields, More&& more) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  packer.pack_map(fields + 1);
  packer.pack(std::string_view("v")).pack(stream_schema_version);
  more(packer);
  return {buffer.data(), buffer.size()};
}

template <class Message>
std::uint32_t fields_of(Message& message) {
  std::uint32_t fields = 0;
  visit_fields([&](std::string_view, auto&) { ++fields; }, message);
  return fields;
}

/// Unpacks a map of that version and has `read` read it; errors are told with the name of what was read.
template <class Message, class Read>
Result<Message> read_map(std::string_view what, std::span<const std::byte> bytes, std::size_t most, Read&& read) {
  if (bytes.size() > most)
    return {Errc::malformed, fmt::format("a {} of {} bytes is above the limit of {}", what, bytes.size(), most)};
  try {
    const auto blob = static_cast<std::uint32_t>(most);
    const msgpack::unpack_limit limit(0, 32, 64, blob, 0, 2);
    std::size_t offset = 0;
    const auto handle =
        msgpack::unpack(reinterpret_cast<const char*>(bytes.data()), bytes.size(), offset, nullptr, nullptr, limit);
    if (offset != bytes.size()) throw Malformed("bytes follow it");
    std::uint32_t version = 0;
    Reader reader(handle.get());
    reader("v", version);
    if (version != stream_schema_version)
      return {Errc::version_mismatch,
              fmt::format("the {} has schema version {}, this engine reads {}", what, version, stream_schema_version)};
    return read(handle.get());
  } catch (const std::exception& e) {
    return {Errc::malformed, fmt::format("malformed {} of {} bytes: {}", what, bytes.size(), e.what())};
  }
}

}  // namespace

std::string encode(const StreamTicket& ticket) {
  StreamTicket copy = ticket;
  return write_map(fields_of(copy), [&](Packer& packer) { visit_fields(Writer(packer), copy); });
}

Result<StreamTicket> decode_ticket(std::span<const std::byte> bytes) {
  return read_map<StreamTicket>("stream ticket", bytes, max_ticket_bytes, [](const msgpack::object& map) {
    StreamTicket ticket;
    visit_fields(Reader(map), ticket);
    return ticket;
  });
}

std::string encode(const StreamMessage& message) {
  return std::visit(
      [&](auto body) {
        return write_map(fields_of(body) + 2, [&](Packer& packer) {
          packer.pack(std::string_view("t")).pack(type_names[message.body.index()]);
          packer.pack(std::string_view("s")).pack(message.stream);
          visit_fields(Writer(packer), body);
        });
      },
      message.body);
}

Result<StreamMessage> decode_stream_message(std::span<const std::byte> bytes) {
  return read_map<StreamMessage>("stream message", bytes, 64 * 1024, [](const msgpack::object& map) {
    StreamMessage message;
    Reader reader(map);
    reader("s", message.stream);
    const msgpack::object* type = find_key(map, "t");
    if (!type || type->type != msgpack::type::STR) throw Malformed("field 't' is missing");
    message.body = read_body({type->via.str.ptr, type->via.str.size}, map);
    return message;
  });
}

}  // namespace kvferry
