// The packets on a channel's unix socket. Both sides run under one kernel on one processor, so the
// fields travel in native order; every packet is one fixed struct, `message` with its bytes behind it.
//
//   initiator                         target
//   hello                       →
//                               ←     welcome (+ the control page's memfd) or refusal, then the end
//   region_request              →     at the first use of a region
//                               ←     region_reply (+ the region's memfd)
//                               ←     region_gone, unasked, when a region that was given is released
//   notification, message       →
//                               ←     ack, once the target's engine has accepted it
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include <kvferry/runtime/region.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry::shm {

inline constexpr std::uint32_t protocol_magic = 0x4b46534d;
inline constexpr std::uint16_t protocol_version = 1;

/// Most notifications and messages of one channel that the target has not acknowledged yet.
inline constexpr std::uint32_t max_unacknowledged = 64;

enum class PacketKind : std::uint16_t {
  hello = 1,
  welcome = 2,
  refusal = 3,
  region_request = 4,
  region_reply = 5,
  region_gone = 6,
  notification = 7,
  message = 8,
  ack = 9
};

struct PacketHeader {
  std::uint32_t magic = protocol_magic;
  std::uint16_t version = protocol_version;
  PacketKind kind{};
};

/// Text of an error, cut to fit.
struct PacketText {
  std::uint16_t code = 0;  ///< Errc
  std::uint16_t size = 0;
  std::array<char, 380> text{};

  static PacketText of(const Status& status);
  Status status() const;
};

struct HelloPacket {
  PacketHeader header{.kind = PacketKind::hello};
  Token token{};
  std::uint64_t target_incarnation = 0;
};

/// Bytes that lie at a known address of the target: whoever reads them back can read its memory.
using Nonce = std::array<std::byte, 32>;

struct WelcomePacket {
  PacketHeader header{.kind = PacketKind::welcome};
  std::uint64_t nonce_address = 0;
  Nonce nonce{};
};

struct RefusalPacket {
  PacketHeader header{.kind = PacketKind::refusal};
  PacketText why;
};

struct RegionRequestPacket {
  PacketHeader header{.kind = PacketKind::region_request};
  RegionKey key;
};

struct RegionReplyPacket {
  PacketHeader header{.kind = PacketKind::region_reply};
  RegionKey key;
  std::uint64_t size = 0;     ///< bytes
  std::uint64_t address = 0;  ///< in the target, for foreign memory
  Access access = Access::none;
  std::uint8_t foreign = 0;  ///< 1: no memfd comes, the memory is the target's own
  std::array<std::byte, 6> unused{};
  PacketText why;  ///< code 0: the region is given
};

struct RegionGonePacket {
  PacketHeader header{.kind = PacketKind::region_gone};
  RegionKey key;
};

struct NotificationPacket {
  PacketHeader header{.kind = PacketKind::notification};
  std::uint64_t number = 0;  ///< for the ack
  std::uint64_t sequence = 0;
  std::uint32_t immediate = 0;
  std::uint32_t unused = 0;
};

struct MessagePacket {
  PacketHeader header{.kind = PacketKind::message};
  std::uint64_t number = 0;
  std::uint64_t sequence = 0;
};

struct AckPacket {
  PacketHeader header{.kind = PacketKind::ack};
  std::uint64_t number = 0;
};

/// Room for every packet, and one byte more so that a longer one shows.
inline constexpr std::size_t receive_buffer_bytes = sizeof(MessagePacket) + max_message_bytes + 1;

template <class Packet>
std::span<const std::byte> bytes_of(const Packet& packet) noexcept {
  static_assert(std::has_unique_object_representations_v<Packet>, "padding would carry memory to the peer");
  return std::as_bytes(std::span(&packet, 1));
}

/// The header, unless the packet is too short for one.
std::optional<PacketHeader> header_of(std::span<const std::byte> packet) noexcept;

/// Reads a packet of exactly this size.
template <class Packet>
std::optional<Packet> decode(std::span<const std::byte> bytes) noexcept {
  static_assert(std::is_trivially_copyable_v<Packet>);
  if (bytes.size() != sizeof(Packet)) return std::nullopt;
  Packet packet;
  std::memcpy(static_cast<void*>(&packet), bytes.data(), sizeof packet);
  return packet;
}

}  // namespace kvferry::shm
