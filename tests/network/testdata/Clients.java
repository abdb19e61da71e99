import java.io.InputStream;
import java.net.HttpURLConnection;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpClient.Version;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.WebSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.MessageDigest;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import javax.net.ssl.HttpsURLConnection;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** Clients of Java's standard library. Prints "ok NAME" for each that got its answer. */
class Clients {
    static int failed;

    static void check(String name, Object want, Callable<Object> client) {
        try {
            Object got = client.call();
            if (want.equals(got)) {
                System.out.println("ok " + name);
                return;
            }
            System.out.println("not ok " + name + " " + got);
        } catch (Exception e) {
            System.out.println("not ok " + name + " " + e + " " + e.getCause());
        }
        failed = 1;
    }

    /** Programs trust Java's own store, but where CA names a certificate. */
    static void trust(String file) throws Exception {
        KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null, null);
        try (InputStream in = Files.newInputStream(Path.of(file))) {
            store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(in));
        }
        TrustManagerFactory managers = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        managers.init(store);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, managers.getTrustManagers(), null);
        SSLContext.setDefault(context);
    }

    static HttpRequest.Builder to(String url) {
        return HttpRequest.newBuilder(URI.create(url));
    }

    static String old(String url, String method, String body) throws Exception {
        HttpURLConnection c = (HttpURLConnection) URI.create(url).toURL().openConnection();
        c.setRequestMethod(method);
        if (!body.isEmpty()) {
            c.setDoOutput(true);
            c.setChunkedStreamingMode(0);
            c.getOutputStream().write(body.getBytes());
        }
        try (InputStream in = c.getInputStream()) {
            return new String(in.readAllBytes()).trim();
        }
    }

    static String chat(HttpClient client, String url) throws Exception {
        CompletableFuture<String> answer = new CompletableFuture<>();
        StringBuilder text = new StringBuilder();
        WebSocket ws = client.newWebSocketBuilder().buildAsync(URI.create(url), new WebSocket.Listener() {
            public CompletionStage<?> onText(WebSocket ws, CharSequence part, boolean last) {
                text.append(part);
                if (last) {
                    answer.complete(text.toString());
                }
                ws.request(1);
                return null;
            }

            public void onError(WebSocket ws, Throwable e) {
                answer.completeExceptionally(e);
            }
        }).get();
        ws.sendText("a".repeat(20000), true).get();
        String got = answer.get();
        ws.sendClose(WebSocket.NORMAL_CLOSURE, "").get();
        return got;
    }

    public static void main(String[] args) throws Exception {
        String ca = System.getenv("CA");
        if (ca != null) {
            trust(ca);
        }
        HttpClient h2 = HttpClient.newBuilder().followRedirects(HttpClient.Redirect.NORMAL).build();
        HttpClient h1 = HttpClient.newBuilder().version(Version.HTTP_1_1).build();
        byte[] large = new byte[4 << 20];
        for (int i = 0; i < large.length; i++) {
            large[i] = (byte) i;
        }
        String sum = HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(large));
        for (String scheme : List.of("http", "https")) {
            String base = scheme + "://site.test";
            for (String method : List.of("GET", "POST", "PUT", "DELETE")) {
                boolean has = method.equals("POST") || method.equals("PUT");
                String want = method + " /echo/x" + (has ? " data" : "");
                check("HttpClient-" + scheme + "-" + method, want, () -> h1.send(
                    to(base + "/echo/x").method(method, has ? BodyPublishers.ofString("data") : BodyPublishers.noBody()).build(),
                    BodyHandlers.ofString()).body().trim());
                check("HttpURLConnection-" + scheme + "-" + method, want, () -> old(base + "/echo/x", method, has ? "data" : ""));
            }
            check("WebSocket-" + scheme, "echo " + "a".repeat(20000), () -> chat(h1, base.replace("http", "ws") + "/chat"));
        }
        check("HttpClient-2", Version.HTTP_2 + " 200", () -> {
            HttpResponse<String> r = h2.send(to("https://site.test/echo/x").build(), BodyHandlers.ofString());
            return r.version() + " " + r.statusCode();
        });
        // It offers HTTP/2 with the first request of a connection, with a body too.
        check("HttpClient-default", "GET /echo/x POST /echo/x data", () -> h2.send(to("http://site.test/echo/x").build(), BodyHandlers.ofString()).body().trim()
            + " " + h2.send(to("http://site.test:8080/echo/x").POST(BodyPublishers.ofString("data")).build(), BodyHandlers.ofString()).body().trim());
        check("HttpClient-2-at-once", true, () -> {
            List<CompletableFuture<HttpResponse<String>>> all = new ArrayList<>();
            for (int i = 0; i < 50; i++) {
                all.add(h2.sendAsync(to("https://site.test/echo/" + i).build(), BodyHandlers.ofString()));
            }
            for (int i = 0; i < 50; i++) {
                if (!all.get(i).get().body().equals("GET /echo/" + i + "\n")) {
                    return all.get(i).get().body();
                }
            }
            return true;
        });
        check("HttpClient-redirect", "GET /echo/redirected", () -> h2.send(to("https://site.test/redirect").build(), BodyHandlers.ofString()).body().trim());
        check("HttpClient-download", 8 << 20, () -> h2.send(to("https://site.test/bytes/8388608").build(), BodyHandlers.ofByteArray()).body().length);
        check("HttpClient-upload", sum, () -> h2.send(to("https://site.test/sum").PUT(BodyPublishers.ofByteArray(large)).build(), BodyHandlers.ofString()).body());
        check("HttpClient-upload-1.1", sum, () -> h1.send(to("https://site.test/sum").PUT(BodyPublishers.ofByteArray(large)).build(), BodyHandlers.ofString()).body());
        check("HttpClient-ipv6", "GET /echo/6", () -> h2.send(to("https://six.site.test/echo/6").build(), BodyHandlers.ofString()).body().trim());
        check("HttpClient-refused-path", 403, () -> h1.send(to("http://read.test/status/200").build(), BodyHandlers.ofString()).statusCode());
        check("HttpsURLConnection-status", 404, () -> ((HttpsURLConnection) URI.create("https://site.test/status/404").toURL().openConnection()).getResponseCode());
        check("HttpURLConnection-refused-name", "java.net.UnknownHostException", () -> {
            try {
                return old("https://evil.test/", "GET", "");
            } catch (java.net.UnknownHostException e) {
                return e.getClass().getName();
            }
        });
        System.exit(failed);
    }
}
