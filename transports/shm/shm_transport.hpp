// The shared-memory transport: two engines under one kernel, host memory.
//
// The initiator copies everything itself; the target's CPU takes part in setting a channel up, in
// handing out a region at its first use, and in notifications and messages.
//
//   Engine::allocate'd regions   are memfds: the initiator maps them. Peers get a region that they may
//                                only read in a form that can not be mapped for writing.
//   other memory                 is copied by process_vm_readv/writev, if the kernel lets the two
//                                processes at each other; otherwise its items end with no_path.
//
// What is guaranteed to end, and when:
//
// - Initiator: once an item is complete, whatever its status, neither local nor remote memory moves
//   for it. fence waits for nothing but the portions (ShmConfig::chunk_bytes) in helper threads.
// - Target: once release_region has said true, no peer copies to or from the region: every channel has
//   a page of memory that both sides share, in which the initiator marks each portion that it copies
//   and the target takes rights back. A peer that holds its mark for longer than 100 ms of a forced
//   release (stopped by a debugger, or broken) may still finish that one portion; in engine-allocated
//   memory it then hits pages that nobody else uses any more. A peer that died has stopped copying.
// - A write_imm or send that was fenced before its acknowledgement may have been delivered, or be in
//   delivery; the target delivers nothing that it reads after the fence.
// - Trust: whoever holds a session's token can keep and misuse a mapping. Access::write alone can
//   not be enforced by the kernel (a writable mapping is readable), and neither can the bounds and
//   rights of foreign memory, whose users can reach the whole process anyway.
#pragma once

#include <memory>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/transport.hpp>

namespace kvferry {

namespace shm {
struct Options;
}

std::shared_ptr<Transport> make_shm_transport(const ShmConfig& config);

/// The same with parts replaced, for tests.
std::shared_ptr<Transport> make_shm_transport(const ShmConfig& config, const shm::Options& options);

}  // namespace kvferry
