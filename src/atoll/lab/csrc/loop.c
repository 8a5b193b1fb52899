#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
#define LATE_BY (SECOND / 1000)

/* While packets come densely, the thread looks after them once in so long, not for each: what is due
 * meanwhile goes as one packet where it can. No delivery is later for it than this. */
#define QUANTUM (SECOND / 20000)
enum { DENSE_CYCLES = 8, READS_A_CYCLE = 64, MOST_JOINED = 64, PRIORITY = 40 };

static int64_t clock_ns(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t now_of(const struct emulator *e) { return clock_ns(CLOCK_MONOTONIC) - e->origin; }

/* -- counting -- */

static int bucket_of(int64_t ns)
{
    if (ns < 8)
        return ns < 0 ? 0 : (int)ns;
    int power = 63 - __builtin_clzll((uint64_t)ns);
    int bucket = (power - 2) * 8 + (int)((ns >> (power - 3)) & 7);
    return bucket < HISTOGRAM ? bucket : HISTOGRAM - 1;
}

static void count_lateness(struct emulator *e, int64_t late)
{
    int64_t *c = e->counters;
    late = late > 0 ? late : 0;
    count(&c[WRITTEN], 1);
    count(&c[LATENESS], late);
    count_most(&c[LATENESS_MOST], late);
    count(&c[COUNTERS + bucket_of(late)], 1);
    e->second_written++;
    if (late > LATE_BY) {
        count(&c[LATE], 1);
        e->second_late++;
    }
}

static void count_cpu(struct emulator *e)
{
    int64_t spent = clock_ns(CLOCK_THREAD_CPUTIME_ID) - e->cpu_before;
    __atomic_store_n(&e->counters[CPU], spent, __ATOMIC_RELAXED);
}

/* A second counts as one that it could not keep up with if a hundredth of its packets were late, or one
 * was dropped for want of room or by a write that failed. */
static void count_time(struct emulator *e, int64_t now)
{
    int64_t dropped = 0;
    __atomic_store_n(&e->counters[NOW], now, __ATOMIC_RELAXED);
    if (now / SECOND == e->second)
        return;
    for (int i = 0; i < e->link_count; i++)
        dropped += e->links[i].counters[OVERFLOWED] + e->links[i].counters[UNWRITTEN];
    if (e->second_late * 100 > e->second_written || dropped > e->second_dropped)
        count(&e->counters[BEHIND], 1);
    e->second = now / SECOND;
    e->second_late = e->second_written = 0;
    e->second_dropped = dropped;
    count_cpu(e);
}

/* -- reading -- */

static int target_of(struct emulator *e, struct site *from, const uint8_t *address)
{
    if (memcmp(address, from->last_address, 16)) {
        int i = 0;
        while (i < e->site_count && memcmp(address, e->sites[i].address, 16))
            i++;
        memcpy(from->last_address, address, 16);
        from->last_target = i < e->site_count ? i : -1;
    }
    return from->last_target;
}

static bool for_many(const struct packet *p)
{
    const uint8_t *a = p->destination;
    return p->v6 ? a[0] == 0xff : a[12] >= 224; /* multicast and broadcast: interfaces say hello */
}

static void route(struct emulator *e, int source, int64_t now, const uint8_t *data, ssize_t length)
{
    struct packet packet;
    struct vnet vnet;
    memcpy(&vnet, data, sizeof vnet);
    if (!packet_read(&packet, &vnet, data + sizeof vnet, (uint32_t)length - sizeof vnet)) {
        count(&e->counters[MALFORMED], 1);
        return;
    }
    int target = target_of(e, &e->sites[source], packet.destination);
    int link = target < 0 ? -1 : e->link_of[source * e->site_count + target];
    if (link >= 0)
        link_offer(&e->links[link], now, &packet, data + sizeof vnet);
    else if (!for_many(&packet))
        count(&e->counters[UNROUTED], packet.segments);
}

/* Returns how many packets it read; at most READS_A_CYCLE. */
static int read_site(struct emulator *e, int source)
{
    struct site *site = &e->sites[source];
    int done = 0;
    while (done < READS_A_CYCLE) {
        ssize_t got = read(site->tun, e->buffer, sizeof e->buffer);
        if (got < 0) {
            site->open = errno == EAGAIN || errno == EINTR;
            break;
        }
        done++;
        if (got <= (ssize_t)sizeof(struct vnet))
            count(&e->counters[MALFORMED], 1);
        else
            route(e, source, now_of(e), e->buffer, got);
    }
    count(&e->counters[READS], done);
    return done;
}

/* -- writing -- */

/* Wire packets that go in one write: runs of blocks' segments. */
struct group {
    struct record first, last;
    int pieces, packets;
    uint32_t payload;
    struct iovec iov[2 + MOST_JOINED];
    struct block *blocks[MOST_JOINED];
    uint16_t segments[MOST_JOINED];
};

static void add_piece(struct group *g, const struct record *r)
{
    const struct packet *p = &r->block->packet;
    uint32_t bytes = segment_payload(p, r->segment);
    struct iovec *last = &g->iov[1 + g->pieces];
    if (g->pieces && g->blocks[g->pieces - 1] == r->block) {
        last->iov_len += bytes;
        g->segments[g->pieces - 1]++;
    } else {
        g->blocks[g->pieces] = r->block;
        g->segments[g->pieces++] = 1;
        last[1].iov_base = (void *)block_payload(r->block, r->segment);
        last[1].iov_len = bytes;
    }
    g->payload += bytes;
    g->packets++;
    g->last = *r;
}

static bool single(const struct record *r) { return r->copies > 1 || r->corrupted; }

/* May `next` go in one write behind the group's last? */
static bool joins(const struct emulator *e, const struct group *g, const struct record *next)
{
    const struct record *last = &g->last;
    const struct packet *p = &last->block->packet;
    if (single(&g->first) || single(next) || segment_payload(p, last->segment) < g->first.block->packet.gso)
        return false;
    if (p->header + g->payload + next->block->packet.gso > 65000)
        return false;
    if (next->block == last->block)
        return next->segment == last->segment + 1 && (p->kind == TCP || e->joins_udp);
    return e->joins_udp && g->pieces < MOST_JOINED &&
           packets_alike(&g->first.block->packet, g->first.block->data, &next->block->packet,
                         next->block->data);
}

static bool put(struct link *l, int tun, struct iovec *iov, int pieces, int packets, int64_t bytes)
{
    ssize_t done;
    do
        done = writev(tun, iov, pieces);
    while (done < 0 && errno == EINTR);
    if (done < 0)
        return false;
    count(&l->counters[DELIVERED_PACKETS], packets);
    count(&l->counters[DELIVERED_BYTES], bytes);
    return true;
}

static bool write_group(struct emulator *e, struct link *l, struct group *g)
{
    const struct packet *p = &g->first.block->packet;
    struct vnet vnet;
    uint8_t header[LONGEST_HEADER];
    memcpy(header, g->first.block->data, p->header);
    packet_head(p, header, g->first.segment, g->first.segment + g->packets - 1u, g->payload,
                (uint32_t)g->packets, &vnet);
    g->iov[0] = (struct iovec){&vnet, sizeof vnet};
    g->iov[1] = (struct iovec){header, p->header};
    count(&e->counters[WRITES], 1);
    return put(l, e->sites[l->target].tun, g->iov, 2 + g->pieces, g->packets,
               g->payload + (int64_t)g->packets * p->header);
}

/* A packet that goes by itself: damaged, or more than once. */
static void write_single(struct emulator *e, struct link *l, const struct record *r)
{
    const struct packet *p = &r->block->packet;
    uint32_t payload = segment_payload(p, r->segment), length = p->header + payload;
    uint8_t *data = e->buffer;
    struct vnet vnet;
    memcpy(data, r->block->data, p->header);
    memcpy(data + p->header, block_payload(r->block, r->segment), payload);
    packet_head(p, data, r->segment, r->segment, payload, 1, &vnet);
    if (r->corrupted)
        packet_corrupt(p, data, length, &vnet, r->draw);
    struct iovec iov[2] = {{&vnet, sizeof vnet}, {data, length}};
    for (int i = 0; i < r->copies; i++) {
        count(&e->counters[WRITES], 1);
        if (!put(l, e->sites[l->target].tun, iov, 2, 1, length))
            count(&l->counters[UNWRITTEN], 1);
    }
}

/* Where the kernel takes no super-packet of this kind, its packets go one by one. */
static void write_apart(struct emulator *e, struct link *l, const struct group *g)
{
    for (int i = 0; i < g->pieces; i++) {
        struct block *block = g->blocks[i];
        uint32_t start = i ? block->first : g->first.segment;
        for (uint32_t s = 0; s < g->segments[i]; s++) {
            struct record one = {.block = block, .segment = (uint16_t)(start + s), .copies = 1};
            write_single(e, l, &one);
        }
    }
}

static void send_group(struct emulator *e, struct link *l, struct group *g)
{
    if (single(&g->first)) {
        write_single(e, l, &g->first);
    } else if (!write_group(e, l, g)) {
        if (errno == EINVAL && g->packets > 1) {
            if (g->first.block->packet.kind == UDP)
                e->joins_udp = false;
            write_apart(e, l, g);
        } else {
            count(&l->counters[UNWRITTEN], g->packets);
        }
    }
    for (int i = 0; i < g->pieces; i++)
        for (int s = g->segments[i]; s; s--)
            link_release(l, g->blocks[i]);
}

/* Deliver what is due on a link by now, not what becomes so meanwhile: others wait. Returns when the next
 * one is due. */
static int64_t deliver(struct emulator *e, struct link *l)
{
    const struct record *next;
    int64_t now = now_of(e), until = now;
    struct group g;
    while ((next = link_next(l)) && next->due <= until) {
        g.pieces = g.packets = 0;
        g.payload = 0;
        g.first = *next;
        do {
            add_piece(&g, next);
            count_lateness(e, now - next->due);
            link_take(l);
        } while ((next = link_next(l)) && next->due <= until && joins(e, &g, next));
        send_group(e, l, &g);
        now = now_of(e);
    }
    return next ? next->due : INT64_MAX;
}

/* -- the loop -- */

static int wait_until(struct emulator *e, int64_t until, bool stop_only)
{
    struct pollfd *polled = e->polled;
    struct timespec timeout = {0, 0};
    int64_t left = until == INT64_MAX ? SECOND : until - now_of(e);
    if (left > 0) {
        timeout.tv_sec = left / SECOND;
        timeout.tv_nsec = left % SECOND;
    }
    for (int i = 0; i < e->site_count; i++)
        polled[i].fd = e->sites[i].open ? e->sites[i].tun : -1;
    int from = stop_only ? e->site_count : 0;
    return ppoll(polled + from, (nfds_t)(e->site_count - from + 1), &timeout, 0) < 0 ? errno : 0;
}

static int loop(struct emulator *e, int stop, bool (*interrupted)(void *), void *context)
{
    int64_t last = -SECOND;
    int streak = 0, stop_index = e->site_count;
    bool all = true; /* look at every TUN, whatever poll said */
    e->polled[stop_index] = (struct pollfd){.fd = stop, .events = POLLIN};
    for (int i = 0; i < stop_index; i++)
        e->polled[i] = (struct pollfd){.fd = e->sites[i].tun, .events = POLLIN};
    for (;;) {
        int64_t begun = now_of(e), next = INT64_MAX, written = e->counters[WRITTEN];
        int work = 0;
        bool more = false;
        for (int i = 0; i < e->site_count; i++) {
            if (!e->sites[i].open || !(all || e->polled[i].revents))
                continue;
            int done = read_site(e, i);
            more |= done == READS_A_CYCLE;
            work += done;
        }
        for (int i = 0; i < e->link_count; i++) {
            int64_t due = deliver(e, &e->links[i]);
            next = due < next ? due : next;
        }
        count_time(e, begun);
        if (work || e->counters[WRITTEN] != written) {
            streak = begun - last < 2 * QUANTUM ? streak + 1 : 0;
            last = begun;
        }
        bool dense = streak >= DENSE_CYCLES && begun - last < 2 * QUANTUM;
        all = more || dense;
        int error = wait_until(e, more ? 0 : dense ? begun + QUANTUM : next, all);
        if (error && error != EINTR)
            return error;
        if (error == EINTR && interrupted(context))
            return 0;
        if (error) {
            all = true;
            continue;
        }
        if (e->polled[stop_index].revents)
            return 0;
    }
}

int loop_run(struct emulator *e, int stop, bool (*interrupted)(void *), void *context)
{
    struct sched_param before, wanted = {.sched_priority = PRIORITY};
    int policy = sched_getscheduler(0);
    sched_getparam(0, &before);
    bool realtime = !sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &wanted);
    bool locked = !mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT);
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1UL);
    e->counters[REALTIME] = realtime;
    e->counters[LOCKED] = locked;
    e->cpu_before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    e->origin = clock_ns(CLOCK_MONOTONIC);
    e->counters[STARTED] = e->origin;
    int error = loop(e, stop, interrupted, context);
    count_cpu(e);
    __atomic_store_n(&e->counters[NOW], now_of(e), __ATOMIC_RELAXED);
    prctl(PR_SET_TIMERSLACK, (unsigned long)slack);
    if (locked)
        munlockall();
    /* Who needed no privilege to ask for reset-on-fork would need one to be rid of it. */
    if (realtime && sched_setscheduler(0, policy, &before))
        sched_setscheduler(0, policy | SCHED_RESET_ON_FORK, &before);
    return error;
}
