// How the two sides of a benchmark agree on what comes next: MessagePack maps, carried by kvferry's
// own messages. The initiator asks, the target answers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <kvferry/actors/engine.hpp>

#include "bench/workload.hpp"

namespace kvferry::bench {

using Json = nlohmann::json;
struct FloorRequest;

/// Rises when the messages below change; both sides must have the same.
inline constexpr int control_version = 1;

/// Longest time a side takes to answer: filling and checking of large regions included.
inline constexpr std::chrono::seconds answer_limit{60};

std::vector<std::byte> encode(const Json& message);
Result<Json> decode(std::span<const std::byte> bytes);

Json to_json(const Workload& workload);
/// Refuses missing fields, unknown patterns, and sizes that overflow.
Result<Workload> workload_from(const Json& json);

/// An ordered exchange of messages with one peer. Not to be used by two threads at once.
class Conversation {
 public:
  /// `outgoing` comes from Engine::connect, `incoming` from Engine::accept or peers().
  Conversation(Engine& engine, Peer outgoing, Peer incoming)
      : engine_(engine), outgoing_(std::move(outgoing)), incoming_(std::move(incoming)) {}

  const Peer& outgoing() const { return outgoing_; }
  const Peer& incoming() const { return incoming_; }

  Status send(const Json& message);
  /// timed_out when nothing came within `limit`; the conversation goes on then.
  Result<Json> receive(Duration limit);

 private:
  Engine& engine_;
  Peer outgoing_;
  Peer incoming_;
  std::vector<std::byte> buffer_;
};

/// Fields of a message that came from the other side: nothing is taken for granted about them.
std::optional<std::uint64_t> number_field(const Json& json, const char* key);
std::string text_field(const Json& json, const char* key);  ///< empty when there is none

/// The target's region as the initiator may use it.
struct TargetRegion {
  RemoteHandle handle;
  int pid = -1;    ///< of the target's process
  int memfd = -1;  ///< descriptor in that process that holds the region's bytes, or -1
};

/// Something on the target that answers raw traffic, for the floor.
struct FloorService {
  std::uint64_t id = 0;
  int port = 0;    ///< tcp: where it listens, on the host of the target
  int memfd = -1;  ///< shm: descriptor in the target's process
};

/// The initiator's end. Every call waits at most answer_limit.
class ControlClient {
 public:
  /// Connects to the target and has it connect back.
  static Result<ControlClient> connect(Engine& engine, const std::string& address);

  const Peer& peer() const { return conversation_.outgoing(); }
  const Peer& incoming() const { return conversation_.incoming(); }

  /// Has the target allocate a region of at least `bytes`.
  Result<TargetRegion> prepare(std::uint64_t bytes);
  Status fill(const Workload& workload, std::uint64_t round);
  Status poison(const Workload& workload);
  /// Fills the whole region with one pattern, in blocks of `block_size`, block i keyed by i.
  Status fill_pool(std::uint64_t block_size, std::uint64_t blocks, std::uint64_t seed);
  /// Empty when every byte is right, otherwise where it is not.
  Result<std::string> verify(const Workload& workload, std::uint64_t round);
  /// Forgets the notifications counted so far.
  Status reset_notifications();
  /// Empty when exactly `count` notifications with immediates 0, 1, 2, ... came.
  Result<std::string> verify_notifications(std::uint64_t count);
  /// From now on the target sends every message back, until end_echo().
  Status start_echo();
  Status end_echo();
  Result<FloorService> open_floor(const FloorRequest& request);
  Status close_floor(std::uint64_t id);
  /// Ends the session: the target frees what it held for it.
  Status bye();

 private:
  ControlClient(Engine& engine, Conversation conversation) : engine_(&engine), conversation_(std::move(conversation)) {}
  Result<Json> ask(std::string_view type, Json request);
  Status ask(std::string_view type);
  Result<std::string> ask_mismatch(std::string_view type, Json request);

  Engine* engine_;
  Conversation conversation_;
  std::uint64_t next_id_ = 0;
};

/// The address of this host from which packets to `endpoint` (tcp://HOST:PORT) would leave.
Result<std::string> host_towards(const std::string& endpoint);

/// HOST of tcp://HOST:PORT, brackets of an IPv6 address removed.
std::string host_of(const std::string& endpoint);

}  // namespace kvferry::bench
