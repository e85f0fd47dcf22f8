// What two verbs ports tell each other: the address of a port, the exchange that connects a channel, and
// the head of a message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/gid.hpp>

namespace kvferry::verbs {

/// Most queue pairs of a channel.
inline constexpr std::size_t most_pairs = 64;

/// Names a port or a channel: nobody else has it, and nobody guesses it.
std::uint64_t random_number();

/// One device of a port, as its address names it.
struct DeviceAddress {
  std::string name;
  bool ethernet = true;
  std::uint16_t lid = 0;
  std::uint32_t mtu = 0;  ///< bytes
  std::vector<Gid> gids;  ///< ranked
};
/// A port's address: its devices in order.
struct PortAddress {
  std::uint64_t port = 0;  ///< random: tells ports of one engine apart
  std::vector<DeviceAddress> devices;
  std::uint16_t cm_port = 0;  ///< where it listens through librdmacm, on the addresses of all devices; 0: it does not
};

/// How to reach a queue pair.
struct PairAddress {
  std::uint32_t number = 0;
  std::uint32_t psn = 0;  ///< first packet sequence number, 24 bits
};

/// Initiator → target: connect these queue pairs with new ones of yours.
struct ConnectRequest {
  Token token{};
  std::uint64_t target_incarnation = 0;
  std::uint64_t channel = 0;     ///< random: names the channel on both sides
  std::uint32_t device = 0;      ///< of the target, by its place in the PortAddress
  std::uint32_t gid_index = 0;   ///< of the target's table
  std::uint32_t mtu = 0;         ///< bytes
  std::uint32_t read_depth = 0;  ///< most reads that the initiator has in flight per pair
  std::uint16_t lid = 0;         ///< of the initiator, as all below
  RawGid gid{};
  bool global = false;  ///< addressed by GID
  std::vector<PairAddress> pairs;
};
/// Target → initiator.
struct ConnectAnswer {
  std::uint32_t mtu = 0;            ///< bytes; the smaller of the two
  std::uint32_t read_depth = 0;     ///< reads that the target serves at a time per pair
  std::uint32_t notifications = 0;  ///< notifications that may be under way
  std::uint32_t messages = 0;       ///< messages that may be under way
  std::vector<PairAddress> pairs;
};
/// Initiator → target: end this channel; the answer says that nothing of it moves any more.
struct CloseRequest {
  std::uint64_t channel = 0;
};

std::string encode(const PortAddress& address);
std::string encode(const ConnectRequest& request);
std::string encode(const ConnectAnswer& answer);
std::string encode(const CloseRequest& request);

/// Errors of all: malformed.
Result<PortAddress> decode_port_address(std::string_view bytes);
Result<ConnectRequest> decode_connect_request(std::string_view bytes);
Result<ConnectAnswer> decode_connect_answer(std::string_view bytes);
Result<CloseRequest> decode_close_request(std::string_view bytes);
bool is_close_request(std::string_view bytes);

// ---------------------------------------------------------------- messages between queue pairs

enum class HeadKind : std::uint32_t { notification = 1, message = 2, accepted = 3 };

/// Stands before the bytes of a message; all there is of a notification. Little-endian, 32 bytes.
struct Head {
  HeadKind kind = HeadKind::notification;
  std::uint32_t immediate = 0;  ///< notification: its value; accepted: how many numbers follow
  std::uint64_t sequence = 0;   ///< see WorkItem::sequence
  std::uint64_t channel = 0;    ///< as in ConnectRequest
  std::uint32_t number = 0;     ///< of this message or notification on this channel
  std::uint32_t bytes = 0;      ///< that follow
};
inline constexpr std::size_t head_bytes = 32;
void encode_head(const Head& head, std::byte* to) noexcept;
Head decode_head(const std::byte* from) noexcept;

/// The numbers that follow the head of HeadKind::accepted, 4 bytes each.
void encode_numbers(std::deque<std::uint32_t>::const_iterator first, std::size_t count, std::byte* to) noexcept;
std::uint32_t decode_number(const std::byte* from) noexcept;

}  // namespace kvferry::verbs
