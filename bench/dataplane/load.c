// The load: `load port=P name=value ...` sends to a proxy on 127.0.0.1, checks every answer, and prints one JSON object.
//
//   posts=N      N connections that POST a small JSON, one request after the other
//   streams=N    N connections that POST for a stream of count= events, one every interval_us=; once each, or one after
//                the other where seconds= is given
//   uploads=N    N connections that POST bodies of upload_bytes=, each every upload_every_ms= (0: one after the other)
//   seconds=S    how long to begin new requests; without it the streams' ends are the end
//   fresh=1      a connection for each request, which the answerer has to close
//   pids=P,...   the processes of the proxy: their CPU time is read when the window opens and when it closes
//
// What is printed is of the window: from all connections being at work to the first one's end. An answer that is not
// what it should be ends the program with status 1 and a sentence. One thread, one epoll.
#include "wire.h"

#define STALL (20 * SECOND)  // without one byte from anywhere
#define MAX_PIDS 64

enum kind { POST, STREAM, UPLOAD };
static const char *const KINDS[] = {"post", "stream", "upload"};

struct connection {
    enum kind kind;
    int fd;
    const char *request;
    size_t request_size, sent;
    int64_t began;  // ns; of a paced one that waits: when it will
    bool waits, idle;
    char head[HEAD_MAX + 1];
    size_t head_size;
    bool in_body, first_byte_seen;
    struct body body;
    char text[8192];  // of the body: all of a small one, the unfinished line of a stream
    size_t text_size;
    int64_t events;
    bool done_seen;
};

struct series {
    int64_t *values;
    size_t size, room;
};

struct counters {
    int64_t at, cpu, requests, events, sent;
};

static struct {
    long long port, posts, streams, count, interval_us, uploads, upload_bytes, upload_every_ms, fresh;
    double seconds;
    char *pids;
} options;

static int poll_fd;
static struct connection *connections;
static size_t connection_count, at_work;
static int64_t start, deadline, last_byte;
static struct counters total, opened, closed;
static struct series request_ns[3], first_byte_ns, delay_ns;
static size_t streams_begun, streams_ended;
static clockid_t clocks[MAX_PIDS];
static int clock_count;

#define fail(c, ...) \
    (fprintf(stderr, "a %s request: ", KINDS[(c)->kind]), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

static bool is_open(void) { return opened.at && !closed.at; }

static void add(struct series *s, int64_t value) {
    if (!is_open()) return;
    if (s->size == s->room) {
        s->room = s->room ? 2 * s->room : 4096;
        s->values = realloc(s->values, s->room * sizeof *s->values);
    }
    s->values[s->size++] = value;
}

static int64_t cpu_ns(void) {
    int64_t sum = 0;
    for (int i = 0; i < clock_count; i++) {
        struct timespec t;
        if (clock_gettime(clocks[i], &t)) fprintf(stderr, "a process of the proxy has ended\n"), exit(1);
        sum += t.tv_sec * SECOND + t.tv_nsec;
    }
    return sum;
}

static void mark(struct counters *to) {
    *to = total;
    to->cpu = cpu_ns();
    to->at = now_ns();
}

static void watch(struct connection *c, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(poll_fd, operation, c->fd, &event);
}

static void pump(struct connection *c) {
    while (c->sent < c->request_size) {
        ssize_t n = send(c->fd, c->request + c->sent, c->request_size - c->sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) return watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
        if (n < 0) fail(c, "sending it: %s", strerror(errno));
        c->sent += (size_t)n, total.sent += n;
    }
    watch(c, EPOLLIN, EPOLL_CTL_MOD);
}

static void join(struct connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    no_delay(c->fd);
    struct sockaddr_in address = loopback((int)options.port);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)
        fail(c, "connecting: %s", strerror(errno));
    watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
}

static void begin(struct connection *c) {
    c->waits = c->in_body = c->first_byte_seen = c->done_seen = false;
    c->sent = c->head_size = c->text_size = 0;
    c->events = 0;
    c->began = now_ns();
    if (c->fd >= 0) return pump(c);
    join(c);  // it is sent when the socket can be written to
}

static void end(struct connection *c) {
    int64_t now = now_ns();
    total.requests++;
    add(&request_ns[c->kind], now - c->began);
    if (options.fresh) close(c->fd), c->fd = -1;
    if (c->kind == STREAM) streams_ended++;
    bool again = deadline ? now < deadline : c->kind != STREAM && streams_ended < (size_t)options.streams;
    if (!again) {
        c->idle = true;
        at_work--;
    } else if (c->kind == UPLOAD && options.upload_every_ms) {
        c->waits = true;
        c->began += options.upload_every_ms * 1000000;
    } else {
        begin(c);
    }
}

static void take_line(struct connection *c, const char *line, size_t size, int64_t now) {
    static const char key[] = "\"content\":\"";
    static size_t usual;  // where the key was last time
    if (size == 12 && !memcmp(line, "data: [DONE]", 12)) c->done_seen = true;
    if (size < 7 || memcmp(line, "data: {", 7)) return;
    const char *found = line + usual;
    if (usual + sizeof key > size || memcmp(found, key, sizeof key - 1)) found = memmem(line, size, key, sizeof key - 1);
    if (found && (size_t)(line + size - found) > sizeof key + STAMP_DIGITS) {
        usual = (size_t)(found - line);
        int64_t stamp = 0;
        for (const char *digit = found + sizeof key - 1; *digit >= '0' && *digit <= '9'; digit++)
            stamp = stamp * 10 + *digit - '0';
        if (stamp < start || stamp > now) fail(c, "an event without a stamp: %.*s", (int)size, line);
        add(&delay_ns, now - stamp);
        total.events++;
        if (++c->events == 1 && ++streams_begun == (size_t)options.streams && !deadline) mark(&opened);
    } else {
        fail(c, "an event that was not sent: %.*s", (int)size, line);
    }
}

static void take_events(struct connection *c, const char *data, size_t size, int64_t now) {
    for (const char *newline; (newline = memchr(data, '\n', size)); size -= (size_t)(newline + 1 - data), data = newline + 1) {
        size_t part = (size_t)(newline - data);
        if (!c->text_size) {
            take_line(c, data, part, now);
            continue;
        }
        if (c->text_size + part > sizeof c->text) fail(c, "a line too long for an event");
        memcpy(c->text + c->text_size, data, part);
        take_line(c, c->text, c->text_size + part, now);
        c->text_size = 0;
    }
    if (c->text_size + size > sizeof c->text) fail(c, "a line too long for an event");
    memcpy(c->text + c->text_size, data, size);
    c->text_size += size;
}

static void keep_text(struct connection *c, const char *data, size_t size) {
    if (c->text_size + size >= sizeof c->text) fail(c, "an answer too long");
    memcpy(c->text + c->text_size, data, size);
    c->text[c->text_size += size] = 0;
}

static void check(struct connection *c) {
    if (c->sent < c->request_size) fail(c, "answered before it was sent");
    if (c->kind == STREAM) {
        if (c->events != options.count) fail(c, "%lld events of %lld", (long long)c->events, options.count);
        if (!c->done_seen) fail(c, "a stream without its last event");
        return;
    }
    if (!strstr(c->text, "\"choices\"") || c->text[c->text_size - 1] != '}') fail(c, "answered with %s", c->text);
    if (c->kind == UPLOAD) {
        const char *counted = strstr(c->text, "\"prompt_tokens\":");
        long long bytes = counted ? atoll(counted + 16) : 0;
        if (bytes != options.upload_bytes)
            fail(c, "%lld bytes of %lld arrived", bytes, options.upload_bytes);
    }
}

// Returns the rest behind the head, or NULL: it is not complete.
static char *take_head(struct connection *c, char *data, size_t *size) {
    size_t before = c->head_size, room = HEAD_MAX - before, copied = *size < room ? *size : room;
    memcpy(c->head + before, data, copied);
    c->head[c->head_size = before + copied] = 0;
    char *found = strstr(c->head, "\r\n\r\n");
    if (!found && c->head_size == HEAD_MAX) fail(c, "a head too long");
    if (!found) return NULL;
    size_t used = (size_t)(found + 4 - c->head) - before;
    found[2] = 0;
    *size -= used;
    if (strncmp(c->head, "HTTP/1.1 200 ", 13)) fail(c, "answered with\n%s\n%.*s", c->head, (int)*size, data + used);
    c->in_body = true;
    c->body = body_of(c->head);
    return data + used;
}

static void take(struct connection *c, char *data, size_t size) {
    int64_t now = now_ns();
    last_byte = now;
    if (!c->first_byte_seen) add(&first_byte_ns, now - c->began);
    c->first_byte_seen = true;
    if (!c->in_body && !(data = take_head(c, data, &size))) return;
    ssize_t payload = size ? unframe(&c->body, data, size) : 0;
    if (payload < 0) fail(c, "the answer's body is not framed as it should be");
    if (c->kind == STREAM) take_events(c, data, (size_t)payload, now);
    else keep_text(c, data, (size_t)payload);
    if (c->body.at != COMPLETE) return;
    check(c);
    if (c->kind == STREAM && !deadline && !closed.at) mark(&closed);
    if (!options.fresh) end(c);  // else when it is closed
}

static void serve(struct connection *c, uint32_t events) {
    static char piece[PIECE];
    if (events & EPOLLOUT) pump(c);
    if (!(events & ~(uint32_t)EPOLLOUT)) return;
    ssize_t n = recv(c->fd, piece, sizeof piece, 0);
    if (n > 0) {
        if (c->idle || c->waits) fail(c, "more than the answer");
        return take(c, piece, (size_t)n);
    }
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) fail(c, "%s", strerror(errno));
    if (options.fresh && c->in_body && c->body.at == COMPLETE) return end(c);
    if (!c->idle) fail(c, "cut short");
    epoll_ctl(poll_fd, EPOLL_CTL_DEL, c->fd, NULL);  // an idle connection may go
}

static char *request_of(enum kind kind, size_t *size) {
    char front[512], back[] = "\"}}]}]}", path[] = "/v1/chat/completions";
    size_t front_size, padding = 0;
    if (kind == POST) {
        strcpy(path, "/v1/completions");
        front_size = (size_t)snprintf(front, sizeof front,
            "{\"model\":\"m\",\"prompt\":\"The tide came in over the flats,\",\"max_tokens\":16,\"temperature\":0.0}");
    } else if (kind == STREAM) {
        front_size = (size_t)snprintf(front, sizeof front,
            "{\"model\":\"sse-%lld-%lld\",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me of the tide.\"}],"
            "\"max_tokens\":%lld,\"stream\":true}", options.count, options.interval_us, options.count);
    } else {
        front_size = (size_t)snprintf(front, sizeof front,
            "{\"model\":\"m\",\"max_tokens\":3,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\","
            "\"image_url\":{\"url\":\"data:image/png;base64,");
        padding = (size_t)options.upload_bytes - front_size - (sizeof back - 1);
    }
    size_t body = kind == UPLOAD ? (size_t)options.upload_bytes : front_size;
    char *request = malloc(512 + body);
    size_t at = (size_t)sprintf(request,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%lld\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        "User-Agent: load\r\nAuthorization: Bearer sk-load\r\nContent-Length: %zu\r\n%s\r\n",
        path, options.port, body, options.fresh ? "Connection: close\r\n" : "");
    memcpy(request + at, front, front_size);
    at += front_size;
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (uint32_t random = 1; padding; padding--) {
        random = random * 1664525 + 1013904223;
        request[at++] = alphabet[random >> 26];
    }
    if (kind == UPLOAD) memcpy(request + at, back, sizeof back - 1), at += sizeof back - 1;
    *size = at;
    return request;
}

static void add_connections(enum kind kind, long long count) {
    if (!count) return;
    size_t size;
    char *request = request_of(kind, &size);
    for (long long i = 0; i < count; i++) {
        struct connection *c = &connections[connection_count++];
        *c = (struct connection){.kind = kind, .fd = -1, .request = request, .request_size = size};
        at_work++;
        if (kind == UPLOAD && options.upload_every_ms) {
            c->waits = true;  // one after the other, not all at once
            c->began = start + options.upload_every_ms * 1000000 * i / count;
        } else {
            begin(c);
        }
    }
}

// Milliseconds until something is due that no byte announces.
static int keep_time(void) {
    int64_t now = now_ns(), next = now + SECOND;
    if (deadline && !opened.at && now > start + (deadline - start) / 6) mark(&opened);
    if (deadline && !closed.at && now >= deadline) mark(&closed);
    if (deadline && !closed.at) next = opened.at ? deadline : start + (deadline - start) / 6;
    if (now - last_byte > STALL) fprintf(stderr, "no byte for %lld s\n", STALL / SECOND), exit(1);
    for (size_t i = 0; i < connection_count; i++) {
        struct connection *c = &connections[i];
        if (!c->waits) continue;
        bool over = deadline ? now >= deadline : streams_ended >= (size_t)options.streams;
        if (over) c->waits = false, c->idle = true, at_work--;
        else if (c->began <= now) begin(c);
        else if (c->began < next) next = c->began;
    }
    return at_work && next > now ? (int)((next - now) / 1000000) + 1 : 0;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void print_series(const char *name, struct series *s) {
    if (!s->size) return;
    qsort(s->values, s->size, sizeof *s->values, by_value);
    printf(", \"%s\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}", name, (double)s->values[(s->size - 1) / 2] / 1e3,
           (double)s->values[(s->size * 99 + 99) / 100 - 1] / 1e3, (double)s->values[s->size - 1] / 1e3);
}

static void read_options(int argc, char **argv) {
    struct { const char *name; long long *value; } numbers[] = {
        {"port", &options.port}, {"posts", &options.posts}, {"streams", &options.streams}, {"count", &options.count},
        {"interval_us", &options.interval_us}, {"uploads", &options.uploads}, {"upload_bytes", &options.upload_bytes},
        {"upload_every_ms", &options.upload_every_ms}, {"fresh", &options.fresh}};
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        bool known = false;
        if (value) *value++ = 0;
        for (size_t j = 0; value && j < sizeof numbers / sizeof *numbers; j++)
            if (!strcmp(argv[i], numbers[j].name)) *numbers[j].value = atoll(value), known = true;
        if (value && !strcmp(argv[i], "seconds")) options.seconds = atof(value), known = true;
        if (value && !strcmp(argv[i], "pids")) options.pids = value, known = true;
        if (!known) fprintf(stderr, "no such option: %s\n", argv[i]), exit(2);
    }
    if (options.uploads && options.upload_bytes < 1024) fprintf(stderr, "upload_bytes= is too small\n"), exit(2);
    for (char *pid = options.pids ? strtok(options.pids, ",") : NULL; pid; pid = strtok(NULL, ",")) {
        if (clock_count == MAX_PIDS || clock_getcpuclockid(atoi(pid), &clocks[clock_count++]))
            fprintf(stderr, "no process %s\n", pid), exit(2);
    }
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    poll_fd = epoll_create1(0);
    start = last_byte = now_ns();
    deadline = options.seconds > 0 ? start + (int64_t)(options.seconds * 1e9) : 0;
    connections = calloc((size_t)(options.posts + options.streams + options.uploads), sizeof *connections);
    add_connections(POST, options.posts);
    add_connections(STREAM, options.streams);
    add_connections(UPLOAD, options.uploads);
    while (at_work) {
        struct epoll_event events[256];
        int n = epoll_wait(poll_fd, events, 256, keep_time());
        if (n < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < n; i++) serve(events[i].data.ptr, events[i].events);
    }
    if (!opened.at) return fprintf(stderr, "over before all connections were at work\n"), 1;
    if (!closed.at) mark(&closed);
    printf("{\"seconds\": %.6f, \"cpu_us\": %.3f, \"requests\": %lld, \"events\": %lld, \"sent_bytes\": %lld",
           (double)(closed.at - opened.at) / 1e9, (double)(closed.cpu - opened.cpu) / 1e3,
           (long long)(closed.requests - opened.requests), (long long)(closed.events - opened.events),
           (long long)(closed.sent - opened.sent));
    print_series("post_us", &request_ns[POST]);
    print_series("upload_us", &request_ns[UPLOAD]);
    print_series("first_byte_us", &first_byte_ns);
    print_series("delay_us", &delay_ns);
    printf("}\n");
    return 0;
}
