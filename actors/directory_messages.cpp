#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <msgpack.hpp>

#include <kvferry/actors/directory_messages.hpp>
#include <kvferry/runtime/map_reader.hpp>

namespace kvferry {
namespace {

constexpr std::size_t most_name = 255;
constexpr std::size_t most_address = 512;
constexpr std::size_t most_role = 64;
constexpr std::size_t most_metadata = 1024;

// Each message lists its fields once; the writer and the reader below walk the same list.
template <class Visitor>
void visit_fields(Visitor&& visit, DirectoryEntry& m) {
  visit("name", m.name), visit("address", m.address), visit("role", m.role), visit("meta", m.metadata);
  visit("inc", m.incarnation);
}
template <class Visitor>
void visit_fields(Visitor&& visit, PublishRequest& m) {
  visit_fields(visit, m.entry);
  visit("key", m.key), visit("ms", m.ms);
}
template <class Visitor>
void visit_fields(Visitor&& visit, WithdrawRequest& m) {
  visit("name", m.name), visit("key", m.key);
}
template <class Visitor>
void visit_fields(Visitor&& visit, FindRequest& m) {
  visit("name", m.name);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ListRequest& m) {
  visit("role", m.role), visit("after", m.after), visit("instance", m.instance), visit("version", m.version);
  visit("ms", m.ms);
}
template <class Visitor>
void visit_fields(Visitor&&, DoneAnswer&) {}
template <class Visitor>
void visit_fields(Visitor&& visit, EntryAnswer& m) {
  visit_fields(visit, m.entry);
}
template <class Visitor>
void visit_fields(Visitor&& visit, ListAnswer& m) {
  visit("instance", m.instance), visit("version", m.version), visit("changed", m.changed), visit("more", m.more),
      visit("entries", m.entries);
}
template <class Visitor>
void visit_fields(Visitor&& visit, RefusedAnswer& m) {
  visit("code", m.code), visit("text", m.text);
}

constexpr std::array<std::string_view, std::variant_size_v<DirectoryBody>> type_names = {
    "publish", "withdraw", "find", "list", "done", "entry", "entries", "refused"};

using Packer = msgpack::packer<msgpack::sbuffer>;

template <class Message>
std::uint32_t fields_of(Message& message) {
  std::uint32_t fields = 0;
  visit_fields([&](std::string_view, auto&) { ++fields; }, message);
  return fields;
}

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
  void put_bytes(const void* data, std::size_t bytes) {
    packer_.pack_bin(static_cast<std::uint32_t>(bytes));
    packer_.pack_bin_body(static_cast<const char*>(data), static_cast<std::uint32_t>(bytes));
  }
  // Names and addresses may hold any bytes, so all of them travel as bin.
  void put(const std::string& bytes) { put_bytes(bytes.data(), bytes.size()); }
  void put(const DirectoryKey& key) { put_bytes(key.data(), key.size()); }
  void put(std::vector<DirectoryEntry>& entries) {
    packer_.pack_array(static_cast<std::uint32_t>(entries.size()));
    for (DirectoryEntry& entry : entries) {
      packer_.pack_map(fields_of(entry));
      visit_fields(*this, entry);
    }
  }

  Packer& packer_;
};

class Reader : public MapReader<Reader> {
 public:
  using MapReader::get;
  using MapReader::MapReader;

  static void get(const msgpack::object& from, std::string& to) { to = bytes_of(from, most_metadata); }
  static void get(const msgpack::object& from, DirectoryKey& to) {
    if (from.type != msgpack::type::BIN || from.via.bin.size != to.size()) throw Malformed("expected 16 bytes");
    std::memcpy(to.data(), from.via.bin.ptr, to.size());
  }
  static void get(const msgpack::object& from, std::vector<DirectoryEntry>& to) {
    if (from.type != msgpack::type::ARRAY) throw Malformed("expected an array");
    to.assign(from.via.array.size, {});
    for (std::size_t i = 0; i < to.size(); ++i) visit_fields(Reader(from.via.array.ptr[i]), to[i]);
  }
};

template <std::size_t Index = 0>
DirectoryBody read_body(std::string_view type, const msgpack::object& map) {
  if constexpr (Index == type_names.size()) {
    throw Malformed(fmt::format("unknown message type '{}'", type.substr(0, 32)));
  } else {
    if (type != type_names[Index]) return read_body<Index + 1>(type, map);
    std::variant_alternative_t<Index, DirectoryBody> body;
    visit_fields(Reader(map), body);
    return body;
  }
}

DirectoryMessage read_message(const msgpack::object& map) {
  DirectoryMessage message;
  Reader reader(map);
  reader("id", message.id);
  const msgpack::object* type = find_key(map, "t");
  if (!type || type->type != msgpack::type::STR) throw Malformed("field 't' is missing");
  message.body = read_body({type->via.str.ptr, type->via.str.size}, map);
  return message;
}

Status check_length(std::string_view field, const std::string& value, std::size_t least, std::size_t most) {
  if (value.size() >= least && value.size() <= most) return {};
  return {Errc::invalid_argument,
          fmt::format("a directory entry's {} has {} bytes: {} to {} are allowed", field, value.size(), least, most)};
}

}  // namespace

Status check_entry(const DirectoryEntry& entry) {
  if (Status status = check_length("name", entry.name, 1, most_name); !status) return status;
  if (Status status = check_length("address", entry.address, 1, most_address); !status) return status;
  if (Status status = check_length("role", entry.role, 0, most_role); !status) return status;
  return check_length("metadata", entry.metadata, 0, most_metadata);
}

std::string encode(const DirectoryMessage& message) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  std::visit(
      [&](auto body) {
        packer.pack_map(fields_of(body) + 3);
        packer.pack(std::string_view("v")).pack(directory_schema_version);
        packer.pack(std::string_view("t")).pack(type_names[message.body.index()]);
        packer.pack(std::string_view("id")).pack(message.id);
        visit_fields(Writer(packer), body);
      },
      message.body);
  return {buffer.data(), buffer.size()};
}

Result<DirectoryMessage> decode_directory_message(std::span<const std::byte> bytes) {
  if (bytes.size() > max_directory_answer)
    return {Errc::malformed, fmt::format("a directory message of {} bytes is above the limit of {}", bytes.size(),
                                         max_directory_answer)};
  try {
    const msgpack::unpack_limit limit(max_entries_at_once, 32, 64, most_metadata, 0, 4);
    std::size_t offset = 0;
    const auto handle =
        msgpack::unpack(reinterpret_cast<const char*>(bytes.data()), bytes.size(), offset, nullptr, nullptr, limit);
    if (offset != bytes.size()) throw Malformed("bytes follow the message");
    std::uint32_t version = 0;
    Reader reader(handle.get());
    reader("v", version);
    if (version != directory_schema_version)
      return {Errc::version_mismatch, fmt::format("the directory message has schema version {}, this side reads {}",
                                                  version, directory_schema_version)};
    return read_message(handle.get());
  } catch (const std::exception& e) {
    return {Errc::malformed, fmt::format("malformed directory message of {} bytes: {}", bytes.size(), e.what())};
  }
}

}  // namespace kvferry
