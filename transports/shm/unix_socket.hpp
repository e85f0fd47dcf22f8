// Packets and descriptors over abstract unix sockets (SOCK_SEQPACKET: ordered, reliable, framed).
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/shm/fd.hpp>

namespace kvferry::shm {

enum class IoResult {
  done,    ///< a whole packet went or came
  again,   ///< not now: the socket is full, or empty
  closed,  ///< the other side is gone
  bad      ///< a packet that is larger than allowed or carries more than one descriptor
};

/// A name in the abstract name space that nobody can guess; printable, without the leading zero byte.
Result<std::string> random_socket_name();

/// Listens without blocking.
Result<Fd> listen_at(const std::string& name);

/// Connects without blocking. An empty Fd means that the listener's queue is full: try again soon.
Result<Fd> connect_to(const std::string& name);

/// Sends `head` and `body` as one packet, with a copy of `passed` unless that is -1.
IoResult send_packet(int socket, std::span<const std::byte> head, std::span<const std::byte> body = {},
                     int passed = -1);

/// Receives one packet without any descriptor: the kernel drops what the sender attached. `received`
/// is the part of `buffer` that was filled.
IoResult receive_packet(int socket, std::span<std::byte> buffer, std::span<std::byte>& received);

/// The same, and takes at most one descriptor.
IoResult receive_packet(int socket, std::span<std::byte> buffer, std::span<std::byte>& received, Fd& passed);

/// True when the other side has closed: a look at the socket, without waiting.
bool hung_up(int socket);

}  // namespace kvferry::shm
