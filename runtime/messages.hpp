// Control messages between engines: MessagePack maps, one per ZeroMQ message.
//
// Every message is a map with "v" (schema version), "t" (type) and "id" (pairs an answer with its
// question). Unknown keys are ignored, so that fields may be added without a new version; a
// missing key, a wrong type or a value beyond the limits below makes the message malformed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

inline constexpr std::uint32_t schema_version = 1;
/// What both engines must agree on exactly: control messages and data protocols together.
inline constexpr std::uint32_t protocol_version = 1;

inline constexpr std::size_t max_control_bytes = 8u << 20;
inline constexpr std::size_t max_control_string = 4096;
inline constexpr std::size_t max_control_array = 16384;

/// Initiator → target: who I am, whom I expect.
struct HelloMessage {
  std::uint32_t protocol = protocol_version;
  std::string name;
  std::uint64_t incarnation = 0;
  std::string host_id;
};

/// One port of the target that serves data.
struct PortAdvert {
  std::string transport;
  std::string address;
};

/// Target → initiator: who I am, how to reach my data ports, what is registered.
struct WelcomeMessage {
  std::uint32_t protocol = protocol_version;
  std::string name;
  std::uint64_t incarnation = 0;
  std::string host_id;
  std::string data_host;  ///< where the data ports listen; empty: the host of the control address
  std::array<std::byte, 16> token{};
  std::vector<PortAdvert> ports;
  std::vector<RemoteRegion> regions;
};

/// The answer to anything that is not granted.
struct RefusedMessage {
  std::uint32_t protocol = protocol_version;
  std::uint32_t code = 0;  ///< Errc
  std::string text;
};

/// Are you still there, in the same life?
struct PingMessage {
  std::uint64_t incarnation = 0;  ///< of the sender
};
struct PongMessage {
  std::uint64_t incarnation = 0;  ///< of the answering engine
  bool known = false;             ///< whether the sender's session still exists
};

struct FindRegionMessage {
  std::uint64_t incarnation = 0;  ///< of the asking engine
  std::string name;
};
/// No region: `found` is false.
struct RegionMessage {
  bool found = false;
  RemoteRegion region;
};

/// Initiator → target: one port's words to another, which connects or ends a channel.
struct ChannelMessage {
  std::uint64_t incarnation = 0;  ///< of the asking engine
  std::string transport;
  std::string address;  ///< of the target's port, as it advertised it
  std::string request;
};
/// The port's answer; what it refuses is a RefusedMessage.
struct ChannelAnswerMessage {
  std::string answer;
};

/// The sender's engine ends.
struct ByeMessage {
  std::uint64_t incarnation = 0;
};

/// Leased ranges travel as descriptors of this name.
inline constexpr std::string_view lease_descriptor = "lease";
/// Appends a lease's ranges to the descriptors of its region.
void describe_lease(const RangeSet& ranges, RemoteRegion& region);
/// Takes them out again and into RemoteRegion::lease; no-op for what is no lease. Error: malformed.
Status take_lease(RemoteRegion& region);

using ControlBody = std::variant<HelloMessage, WelcomeMessage, RefusedMessage, PingMessage, PongMessage,
                                 FindRegionMessage, RegionMessage, ByeMessage, ChannelMessage, ChannelAnswerMessage>;

struct ControlMessage {
  std::uint64_t id = 0;
  ControlBody body;
};

std::string encode(const ControlMessage& message);

/// Errors: malformed (the text names what), version_mismatch (another schema version; both named).
/// A hello of another protocol version decodes: the target answers it with a refusal.
Result<ControlMessage> decode(std::span<const std::byte> bytes);

}  // namespace kvferry
