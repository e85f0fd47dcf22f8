// What travels over a data connection. All numbers are little-endian, all layouts fixed.
//
//   initiator                               target
//   hello            ────────────────────▶
//                    ◀────────────────────  hello reply (status, text)
//   request, descriptors, payload ───────▶
//                    ◀────────────────────  response, payload or text
//
// A channel is a bundle of such connections that carry the same nonce. Requests on one connection
// may be answered out of order (one whose immediate finds no room waits without holding up others);
// their ids tell which is which. A request is one WorkItem: its payload is the concatenation of all
// its slices, so scattered slices cost one descriptor each and no header.
//
//   hello       0 u32 "KVFH"   4 u16 version  6 u8 purpose   7 u8 socket index
//               8 token[16]   24 u64 target incarnation     32 u64 channel nonce
//   reply       0 u32 "KVFR"   4 u16 version  6 u16 status   8 u16 text bytes  10 u16 zero; text
//   request     0 u8 op        1 zero[3]      4 u32 id       8 u32 region slot 12 u32 generation
//              16 u32 descriptors            20 u32 immediate
//              24 u64 sequence               32 u64 payload bytes; descriptors; payload
//   descriptor  0 u64 offset   8 u64 length (at least 1)
//   response    0 u32 id       4 u16 status   6 u16 text bytes
//               8 u64 payload bytes; payload (status ok) or text
//
// A hello's first eight bytes and the reply keep their layout in every version, so that two engines
// of different versions can tell each other so. A hello with purpose `fence` opens no connection for
// work: the target ends every connection of that token and nonce, then confirms.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::tcp {

inline constexpr std::uint16_t protocol_version = 1;

inline constexpr std::size_t hello_prefix_bytes = 8;
inline constexpr std::size_t hello_bytes = 40;
inline constexpr std::size_t hello_reply_bytes = 12;
inline constexpr std::size_t request_bytes = 40;
inline constexpr std::size_t descriptor_bytes = 16;
inline constexpr std::size_t response_bytes = 16;

inline constexpr std::uint32_t max_descriptors = 1024;
inline constexpr std::size_t max_text_bytes = 512;
inline constexpr std::uint32_t max_sockets = 64;

/// Id of a response that answers no request: the target says why it is about to close.
inline constexpr std::uint32_t goodbye_id = 0xffffffff;

enum class Purpose : std::uint8_t { data = 1, fence = 2 };

struct Hello {
  Purpose purpose = Purpose::data;
  std::uint8_t socket_index = 0;
  Token token{};
  std::uint64_t incarnation = 0;
  std::uint64_t nonce = 0;
};

struct HelloReply {
  std::uint16_t version = protocol_version;
  Errc status = Errc::ok;
  std::uint16_t text_bytes = 0;
};

struct Request {
  Op op = Op::read;
  std::uint32_t id = 0;
  RegionKey region;
  std::uint32_t descriptors = 0;
  std::uint32_t immediate = 0;
  std::uint64_t sequence = 0;
  std::uint64_t payload_bytes = 0;  ///< read: of the response; else: behind the descriptors
};

struct Descriptor {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

struct Response {
  std::uint32_t id = 0;
  Errc status = Errc::ok;
  std::uint16_t text_bytes = 0;
  std::uint64_t payload_bytes = 0;
};

template <class Number>
void store(std::byte* to, Number value) noexcept {
  if constexpr (std::endian::native == std::endian::big) {
    for (std::size_t i = 0; i < sizeof value; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
  } else {
    std::memcpy(to, &value, sizeof value);
  }
}

template <class Number>
Number load(const std::byte* from) noexcept {
  Number value = 0;
  if constexpr (std::endian::native == std::endian::big) {
    for (std::size_t i = 0; i < sizeof value; ++i) value |= static_cast<Number>(from[i]) << (8 * i);
  } else {
    std::memcpy(&value, from, sizeof value);
  }
  return value;
}

inline void encode(const Descriptor& descriptor, std::byte* to) noexcept {
  store(to, descriptor.offset);
  store(to + 8, descriptor.length);
}

inline Descriptor decode_descriptor(const std::byte* from) noexcept {
  return {load<std::uint64_t>(from), load<std::uint64_t>(from + 8)};
}

void encode(const Hello& hello, std::byte* to) noexcept;
void encode(const HelloReply& reply, std::byte* to) noexcept;
void encode(const Request& request, std::byte* to) noexcept;
void encode(const Response& response, std::byte* to) noexcept;

// The decoders answer nothing when a byte is not as the layout says or a count is over its limit.

/// The sender's version, from the first hello_prefix_bytes.
std::optional<std::uint16_t> decode_hello_version(const std::byte* from) noexcept;
std::optional<Hello> decode_hello(const std::byte* from) noexcept;
std::optional<HelloReply> decode_hello_reply(const std::byte* from) noexcept;
std::optional<Request> decode_request(const std::byte* from) noexcept;
std::optional<Response> decode_response(const std::byte* from) noexcept;

}  // namespace kvferry::tcp
