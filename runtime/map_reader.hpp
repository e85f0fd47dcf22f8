// Strict reading of MessagePack maps, shared by the codecs. Internal: only .cpp files of codecs include it.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>
#include <msgpack.hpp>

namespace kvferry {

/// What came is not what the codec expects; what() says where. Never leaves a codec.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The value of `key`, or nullptr. `map` must be a map.
inline const msgpack::object* find_key(const msgpack::object& map, std::string_view key) {
  for (std::uint32_t i = 0; i < map.via.map.size; ++i) {
    const auto& pair = map.via.map.ptr[i];
    if (pair.key.type == msgpack::type::STR && std::string_view(pair.key.via.str.ptr, pair.key.via.str.size) == key)
      return &pair.val;
  }
  return nullptr;
}

/// Visits the fields of a map: operator()(key, value) fills `value` or throws Malformed with the field's path.
/// A codec derives its Codec from it and adds a static get(object, T&) for every type of field beyond these.
template <class Codec>
class MapReader {
 public:
  explicit MapReader(const msgpack::object& map) : map_(map) {
    if (map.type != msgpack::type::MAP) throw Malformed("expected a map");
  }

  template <class T>
  void operator()(std::string_view key, T& value) {
    const msgpack::object* found = find_key(map_, key);
    if (!found) throw Malformed(fmt::format("field '{}' is missing", key));
    try {
      Codec::get(*found, value);
    } catch (const Malformed& e) {
      throw Malformed(fmt::format("field '{}': {}", key, e.what()));
    }
  }

  static void get(const msgpack::object& from, std::uint32_t& to) {
    to = static_cast<std::uint32_t>(number(from, std::numeric_limits<std::uint32_t>::max()));
  }
  static void get(const msgpack::object& from, std::uint64_t& to) {
    to = number(from, std::numeric_limits<std::uint64_t>::max());
  }
  static void get(const msgpack::object& from, bool& to) {
    if (from.type != msgpack::type::BOOLEAN) throw Malformed("expected true or false");
    to = from.via.boolean;
  }

 protected:
  static std::uint64_t number(const msgpack::object& from, std::uint64_t most) {
    if (from.type != msgpack::type::POSITIVE_INTEGER) throw Malformed("expected a number >= 0");
    if (from.via.u64 > most) throw Malformed(fmt::format("{} is above {}", from.via.u64, most));
    return from.via.u64;
  }
  static std::string_view bytes_of(const msgpack::object& from, std::size_t most) {
    if (from.type != msgpack::type::BIN) throw Malformed("expected bytes");
    if (from.via.bin.size > most) throw Malformed(fmt::format("{} bytes are above {}", from.via.bin.size, most));
    return {from.via.bin.ptr, from.via.bin.size};
  }

 private:
  const msgpack::object& map_;
};

}  // namespace kvferry
