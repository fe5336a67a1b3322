// A browser starts no worker from a file. The search wants one, so here it runs in a hidden frame,
// and only where the page was opened without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.onerror = null;
      this.ready = new Promise((resolve) => {
        this.frame = document.createElement("iframe");
        this.frame.hidden = true;
        this.frame.srcdoc = "<!doctype html>";
        this.frame.onload = () => {
          // In a worker's scope postMessage(data) leads to the page. In a window it would not.
          const scope = this.frame.contentWindow;
          scope.postMessage = (data) => this.deliver(this, data);
          const script = scope.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(scope);
          script.onerror = () => this.onerror?.(new ErrorEvent("error"));
          scope.document.body.append(script);
        };
        document.body.append(this.frame);
      });
    }

    // Messages arrive later and as copies, as those of a worker do.
    deliver(receiver, data) {
      const message = new MessageEvent("message", { data: structuredClone(data) });
      setTimeout(() => {
        if (receiver === this) this.onmessage?.(message);
        receiver.dispatchEvent(message);
      });
    }

    postMessage(data) {
      this.ready.then((scope) => this.deliver(scope, data));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
