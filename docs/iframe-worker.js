// Makes the search work where the site is opened from a folder: there browsers start no workers, so
// what the worker runs is run in a frame, which gets and sends the same messages.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.ready = this.load(url);
    }
    load(src) {
      const script = this.inside.document.createElement("script");
      const loaded = new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }));
      script.src = src;
      this.inside.document.body.append(script);
      return loaded;
    }
    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
  };
}
