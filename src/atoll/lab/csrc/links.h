/* A direction of a link, alive: its fates, and the packets that are on their way. */
#ifndef ATOLL_LINKS_H
#define ATOLL_LINKS_H

#include "fates.h"
#include "packets.h"

/* Counters are plain 64-bit integers that one thread writes and others read; emulator.py names them in the
 * same order. */
enum link_counter {
    OFFERED_PACKETS, OFFERED_BYTES, DELIVERED_PACKETS, DELIVERED_BYTES,
    QUEUE_PACKETS, QUEUE_BYTES, LOSS_PACKETS, LOSS_BYTES, OUTAGE_PACKETS, OUTAGE_BYTES,
    DUPLICATED, CORRUPTED, REORDERED, BUSY_PS, QUEUE_DELAY, QUEUE_DELAY_MOST, OVERFLOWED, UNWRITTEN,
    LINK_COUNTERS
};

static inline void count(int64_t *counter, int64_t by)
{
    __atomic_store_n(counter, *counter + by, __ATOMIC_RELAXED);
}

static inline void count_most(int64_t *counter, int64_t value)
{
    if (value > *counter)
        __atomic_store_n(counter, value, __ATOMIC_RELAXED);
}

/* A run of a packet's segments that all survived, in memory: `packet` is the whole that they come from. */
struct block {
    uint32_t size;                /* bytes of the ring that it takes */
    uint32_t left;                /* segments that have not gone yet; 0: free */
    uint32_t first;               /* index of the first one stored */
    struct packet packet;
    uint8_t data[];               /* the header, then the payload of the run */
};

/* One wire packet on its way. */
struct record {
    int64_t due;                  /* ns */
    struct block *block;
    uint16_t segment;             /* index in the packet */
    uint8_t copies, corrupted;
    uint32_t draw;
};

struct link {
    int source, target;           /* sites, from 0 */
    struct direction direction;
    int64_t *counters;
    /* Those that keep their order are due in it; those that overtake lie in a heap. */
    struct record *queue, *heap;
    uint32_t room;                /* records that each may hold, a power of two */
    uint32_t queue_head, queue_tail, heap_count;
    uint8_t *ring;
    uint64_t ring_size, ring_head, ring_tail; /* head and tail grow; their place is modulo the size */
};

/* Reserve memory for `records` and `bytes`; false if there is none. It is touched only as it is used. */
bool link_open(struct link *l, uint32_t records, uint64_t bytes);
void link_close(struct link *l);

/* Decide the fates of what a site has sent at `now`, and keep what will arrive. */
void link_offer(struct link *l, int64_t now, const struct packet *p, const uint8_t *data);

/* The next to arrive, or NULL; `link_take` removes it, and `link_release` frees its segment's memory. */
static inline const struct record *link_next(const struct link *l)
{
    const struct record *first = l->queue_head == l->queue_tail ? 0 : &l->queue[l->queue_tail & (l->room - 1)];
    if (l->heap_count && (!first || l->heap[0].due < first->due))
        return l->heap;
    return first;
}
struct record link_take(struct link *l);
void link_release(struct link *l, struct block *block);

static inline const uint8_t *block_payload(const struct block *b, uint32_t segment)
{
    return b->data + b->packet.header + (uint64_t)(segment - b->first) * b->packet.gso;
}

#endif
