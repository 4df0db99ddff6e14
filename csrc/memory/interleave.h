// Pages of a mapping spread in turn over NUMA nodes, so that the bandwidth of all of them serves it.
//
// Without it all pages lie where the thread runs that touches them first: with one thread on one node, whose memory
// then serves the other nodes' threads too. Free functions without state; any thread may call them. What the system
// refuses (a container's system call filter, a kernel without NUMA) is not an error: pages then lie where they are
// touched.
//
//   const std::vector<int> nodes = nodes_to_interleave(threads.nodes);   // once
//   if (!nodes.empty()) interleave_pages(data, num_bytes, nodes);        // before the first touch
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

// `nodes` when there are several and the system lets this process choose among them, else none: one node needs no
// choice, and a memory policy that the process was started with (numactl) is the user's own.
std::vector<int> nodes_to_interleave(const std::vector<int>& nodes);

// Acts on pages that were not touched yet. `data` starts a page. Whether the system agreed.
bool interleave_pages(void* data, int64_t num_bytes, const std::vector<int>& nodes);

}  // namespace patrickstar
