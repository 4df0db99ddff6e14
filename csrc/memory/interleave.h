// Spreads the pages of a mapping over NUMA nodes, to use the bandwidth of all. Otherwise pages lie on the node of the
// thread that touches them first. If the system refuses (system call filter, no NUMA), pages stay where they are
// touched; this is no error. Stateless; any thread may call it.
//
//   const std::vector<int> nodes = nodes_to_interleave(threads.nodes);   // once
//   if (!nodes.empty()) interleave_pages(data, num_bytes, nodes);        // before the first touch
#pragma once

#include <cstdint>
#include <vector>

namespace patrickstar {

// `nodes` if there are several and this process may choose among them, else none. A memory policy set by the user
// (numactl) is respected.
std::vector<int> nodes_to_interleave(const std::vector<int>& nodes);

// `data` must start a page; only untouched pages move. False if the system refused.
bool interleave_pages(void* data, int64_t num_bytes, const std::vector<int>& nodes);

}  // namespace patrickstar
