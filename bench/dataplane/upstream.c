// A vLLM server's face without an engine: `upstream PORT` answers on 127.0.0.1 until it is killed.
//
//   POST /v1/completions         a small fixed JSON
//   POST /v1/chat/completions    with the model "sse-COUNT-INTERVAL" a stream of COUNT events, one every INTERVAL us;
//                                streams of one interval step together, as an engine's do; 0: as fast as it is taken.
//                                A body of more than 64 KB is swallowed, and answered with its size.
//   what a router wants to know before it sends anything; and 404 for everything else
//
// The parameters are in the model's name because that is what every proxy passes on. One thread, one epoll.
#include "wire.h"
#include <sys/timerfd.h>

#define SMALL 65536           // a body up to here is looked into
#define MAX_CONNECTIONS 8192  // file descriptors
#define TURN 64               // events of a stream at full speed before others have their turn

struct connection {
    int fd;
    char head[HEAD_MAX + 1];
    size_t head_size;
    bool in_body;
    struct body body;
    uint64_t body_bytes;
    char start[1024];  // of the body
    size_t start_size;
    bool close_after;
    bool streaming;
    int64_t events_left, interval, due;  // nanoseconds
    char *out;  // what the socket did not take
    size_t out_size, out_sent;
    struct connection *next, **link;  // of those that stream
};

static struct connection *connections[MAX_CONNECTIONS];
static struct connection *streams;
static int poll_fd, timer_fd;

static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-8d1f0c5ab1cf4d0e9d4c2f7b6a3e5d10\",\"object\":\"chat.completion.chunk\","
    "\"created\":1760000000,\"model\":\"sse\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"0000000000000000000\"},"
    "\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char LAST[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char COMPLETION[] =
    "{\"id\":\"cmpl-8d1f0c5ab1cf4d0e9d4c2f7b6a3e5d10\",\"object\":\"text_completion\",\"created\":1760000000,"
    "\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" and the marks on the pole went under one by one.\","
    "\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"prompt_logprobs\":null}],"
    "\"usage\":{\"prompt_tokens\":11,\"total_tokens\":27,\"completion_tokens\":16,\"prompt_tokens_details\":null}}";
static const char CHAT[] =
    "{\"id\":\"chatcmpl-8d1f0c5ab1cf4d0e9d4c2f7b6a3e5d10\",\"object\":\"chat.completion\",\"created\":1760000000,"
    "\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A pole.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":%llu,\"total_tokens\":%llu,\"completion_tokens\":3}}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1760000000,\"owned_by\":\"vllm\","
    "\"root\":\"m\",\"parent\":null,\"max_model_len\":4096}]}";
static const char INFO[] = "{\"model_path\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true}";

static char framed[sizeof EVENT + 16];  // EVENT as a chunk
static size_t framed_size, stamp_at;

static void frame_event(void) {
    int size = snprintf(framed, sizeof framed, "%zx\r\n%s\r\n", sizeof EVENT - 1, EVENT);
    framed_size = (size_t)size;
    stamp_at = (size_t)(strstr(framed, "0000000000000000000") - framed);
}

static void put_event(char *to) {
    memcpy(to, framed, framed_size);
    int64_t stamp = now_ns();
    for (int i = STAMP_DIGITS - 1; i >= 0; i--, stamp /= 10) to[stamp_at + (size_t)i] = (char)('0' + stamp % 10);
}

static void unlink_stream(struct connection *c) {
    if (!c->streaming) return;
    c->streaming = false;
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
}

static void hang_up(struct connection *c) {
    unlink_stream(c);
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->out);
    free(c);
}

static void watch(struct connection *c, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = c->fd};
    epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

// Send, and keep what the socket does not take. False: the connection is gone.
static bool put(struct connection *c, const char *data, size_t size) {
    size_t sent = 0;
    if (!c->out_size) {
        ssize_t n = send(c->fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return hang_up(c), false;
        sent = n < 0 ? 0 : (size_t)n;
        if (sent == size) return true;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    c->out = realloc(c->out, c->out_size + size - sent);
    memcpy(c->out + c->out_size, data + sent, size - sent);
    c->out_size += size - sent;
    return true;
}

// After an answer: ready for the next request. False: the connection is gone.
static bool answered(struct connection *c) {
    if (c->close_after && !c->out_size) return hang_up(c), false;
    c->in_body = false;
    c->head_size = c->start_size = c->body_bytes = 0;
    return true;
}

static bool put_json(struct connection *c, const char *status, const char *json) {
    char answer[2048];
    int size = snprintf(answer, sizeof answer,
                        "HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n"
                        "%s\r\n%s", status, strlen(json), c->close_after ? "connection: close\r\n" : "", json);
    return put(c, answer, (size_t)size) && answered(c);
}

static bool end_stream(struct connection *c) {
    unlink_stream(c);
    return put(c, LAST, sizeof LAST - 1) && answered(c);
}

// As much as the socket takes, each event a write of its own as from any server. False: the connection is gone.
static bool flow(struct connection *c) {
    char event[sizeof framed];
    for (int i = 0; i < TURN && c->events_left && !c->out_size; i++) {
        put_event(event);
        c->events_left--;
        if (!put(c, event, framed_size)) return false;
    }
    if (!c->events_left && !c->out_size) return end_stream(c);
    if (!c->out_size) watch(c, EPOLLIN | EPOLLOUT);
    return true;
}

static bool begin_stream(struct connection *c, int64_t count, int64_t interval_us) {
    c->streaming = true;
    c->events_left = count;
    c->interval = interval_us * 1000;
    c->next = streams;
    c->link = &streams;
    if (streams) streams->link = &c->next;
    streams = c;
    if (c->interval) {
        c->due = (now_ns() / c->interval + 1) * c->interval;  // the same moments for all of one interval
        return put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    }
    if (count > 1) return put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1) && flow(c);
    // One event at once: one write.
    char answer[sizeof STREAM_HEAD + sizeof framed + sizeof LAST];
    memcpy(answer, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    put_event(answer + sizeof STREAM_HEAD - 1);
    memcpy(answer + sizeof STREAM_HEAD - 1 + framed_size, LAST, sizeof LAST - 1);
    unlink_stream(c);
    return put(c, answer, sizeof STREAM_HEAD - 1 + framed_size + sizeof LAST - 1) && answered(c);
}

static bool answer_chat(struct connection *c) {
    if (c->body_bytes > SMALL) {
        char json[1024];
        snprintf(json, sizeof json, CHAT, (unsigned long long)c->body_bytes, (unsigned long long)c->body_bytes + 3);
        return put_json(c, "200 OK", json);
    }
    c->start[c->start_size < sizeof c->start ? c->start_size : sizeof c->start - 1] = 0;
    const char *model = strstr(c->start, "\"sse-");
    long long count, interval_us;
    if (model && sscanf(model, "\"sse-%lld-%lld\"", &count, &interval_us) == 2 && count > 0 && interval_us >= 0)
        return begin_stream(c, count, interval_us);
    return put_json(c, "400 Bad Request", "{\"error\":{\"message\":\"the model must be sse-COUNT-INTERVAL\"}}");
}

static bool answer(struct connection *c) {
    char method[8] = "", path[256] = "";
    sscanf(c->head, "%7s %255[^ ?]", method, path);
    bool is_post = !strcmp(method, "POST");
    if (is_post && !strcmp(path, "/v1/completions")) return put_json(c, "200 OK", COMPLETION);
    if (is_post && !strcmp(path, "/v1/chat/completions")) return answer_chat(c);
    if (!is_post && !strcmp(path, "/health")) return put_json(c, "200 OK", "{}");
    if (!is_post && !strcmp(path, "/v1/models")) return put_json(c, "200 OK", MODELS);
    if (!is_post && (!strcmp(path, "/get_model_info") || !strcmp(path, "/get_server_info")))
        return put_json(c, "200 OK", INFO);
    return put_json(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
}

// False: the connection is gone.
static bool take(struct connection *c, char *data, size_t size) {
    if (!c->in_body) {
        if (c->streaming) return hang_up(c), false;  // pipelined behind a stream: nobody does that
        size_t before = c->head_size, room = HEAD_MAX - before;
        size_t copied = size < room ? size : room;
        memcpy(c->head + before, data, copied);
        c->head[c->head_size = before + copied] = 0;
        char *end = memmem(c->head, c->head_size, "\r\n\r\n", 4);
        if (!end) return c->head_size < HEAD_MAX || (hang_up(c), false);
        end[2] = 0;
        size_t used = (size_t)(end + 4 - c->head) - before;
        data += used, size -= used;
        c->in_body = true;
        c->body = body_of(c->head);
        c->close_after = header_is(c->head, "connection", "close");
    }
    ssize_t payload = size ? unframe(&c->body, data, size) : 0;
    if (payload < 0) return hang_up(c), false;
    c->body_bytes += (uint64_t)payload;
    size_t room = sizeof c->start - c->start_size, kept = (size_t)payload < room ? (size_t)payload : room;
    memcpy(c->start + c->start_size, data, kept);
    c->start_size += kept;
    if (c->body.at != COMPLETE) return true;
    c->in_body = false;
    return answer(c);
}

static bool flush(struct connection *c) {
    if (c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_sent, c->out_size - c->out_sent, MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN || (hang_up(c), false);
        c->out_sent += (size_t)n;
        if (c->out_sent < c->out_size) return true;
        c->out_size = c->out_sent = 0;
    }
    if (c->streaming && !c->interval) return flow(c);
    if (!c->streaming && c->close_after) return hang_up(c), false;
    watch(c, EPOLLIN);
    return true;
}

static void step(void) {
    int64_t now = now_ns();
    for (struct connection *c = streams, *next; c; c = next) {
        next = c->next;
        if (!c->interval || c->due > now) continue;
        char event[sizeof framed];
        put_event(event);
        c->due = (now / c->interval + 1) * c->interval;  // late: later, not two at once
        if (put(c, event, framed_size) && !--c->events_left) end_stream(c);
    }
}

static void set_timer(void) {
    static int64_t set;
    int64_t soonest = 0;
    for (struct connection *c = streams; c; c = c->next)
        if (c->interval && (!soonest || c->due < soonest)) soonest = c->due;
    if (soonest == set) return;
    set = soonest;
    struct itimerspec when = {.it_value = {soonest / SECOND, soonest % SECOND}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void welcome(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        struct connection *c = fd < MAX_CONNECTIONS ? calloc(1, sizeof *c) : NULL;
        if (!c) {
            close(fd);
            continue;
        }
        no_delay(fd);
        c->fd = fd;
        connections[fd] = c;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void serve(struct connection *c, uint32_t events) {
    static char piece[PIECE];
    if (events & EPOLLOUT && !flush(c)) return;
    if (!(events & ~(uint32_t)EPOLLOUT)) return;
    ssize_t n = recv(c->fd, piece, sizeof piece, 0);
    if (n > 0) take(c, piece, (size_t)n);
    else if (n == 0 || errno != EAGAIN) hang_up(c);
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: upstream PORT\n"), 2;
    frame_event();
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(atoi(argv[1]));
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) die("listen");
    poll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    for (int fd = listener;; fd = timer_fd) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
        if (fd == timer_fd) break;
    }
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poll_fd, events, 256, -1);
        if (n < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) welcome(listener);
            else if (fd == timer_fd) step();
            else if (connections[fd]) serve(connections[fd], events[i].events);
        }
        set_timer();
    }
}
